# SPDX-License-Identifier: Apache-2.0
"""Signatures of Megatron's functions, generation by generation.

Generations are named by what they begin with: A is v2.0, B July 2021 with v2.5 and
v2.6, C September 2021 to January 2022, D0, D1 and D2 begin on 28 January, 8 June and 10
August 2022; then come 23.04, 23.06 and the releases of megatron-core. A row of a
function holds from its generation on, until the next row. ``=`` marks a default and
``*`` what follows as keyword-only: only names, kinds and whether there is a default are
compared, so that forks may change the defaults themselves.
"""

from __future__ import annotations

GENERATIONS = (
    *("A", "B", "C", "D0", "D1", "D2", "23.04", "23.06", "0.4", "0.5", "0.6", "0.7"),
    *("0.8", "0.9", "0.10", "0.11", "0.12", "0.13", "0.14", "0.15", "0.16", "0.17"),
    *("0.18", "0.19"),
)

_DATA = "forward_step_func data_iterator model "
_STORE = "input_tensor forward_data_store "
_BACK = "input_tensor output_tensor output_tensor_grad "
_ITERATORS = "train_data_iterator valid_data_iterator "
_PROCESS = "process_non_loss_data_func "
_CONFIG = _PROCESS + "config "
_OUTPUT = "verbose= write_to_tensorboard= "
_LOG = "loss_scale report_memory_flag skipped_iter "
_NORMS = _LOG + "grad_norm params_norm num_zeros_in_grad "
_DECAY = "no_weight_decay_cond= scale_lr_cond= lr_mult= "
_SETUP = "model_provider_func model_type no_wd_decay_cond= scale_lr_cond= lr_mult= "
_TUNE = "end_of_epoch_callback_provider= "
_LOADERS = "forward_step train_dataloader valid_dataloader end_of_epoch_callback"

Rows = dict[str, str | None]


def _schedule(only_one: bool) -> Rows:
    """Return the rows of a forward-backward function.

    Args:
        only_one: whether it is that of one stage, which takes less.
    """
    old = _DATA + "optimizer timers forward_only "
    shape = "dtype= tensor_shape= " if only_one else "dtype tensor_shape "
    first = f"* {_DATA}num_microbatches {shape}decoder_seq_length= grad_scaler= "
    first += "sequence_parallel= "
    rest = "forward_only= timers= collect_non_loss_data= enable_autocast= "
    rest += "deallocate_pipeline_outputs= no_sync_func= grad_sync_func= "
    rest += "param_sync_func= "
    core = f"* {_DATA}num_microbatches seq_length micro_batch_size decoder_seq_length= "
    core += "forward_only= collect_non_loss_data= "
    shapes = core + "first_val_step= adjust_tensor_shapes_fn= "
    p2p = "" if only_one else "p2p_communicator= "
    return {
        "A": _DATA + "optimizer timers" if only_one else None,
        "B": old,
        "D0": old + "collect_non_loss_data=",
        "23.04": first + rest,
        "23.06": first + "overlap_p2p_comm= batch_p2p_comm= " + rest,
        "0.4": core,
        "0.5": core + "first_val_step=",
        "0.13": shapes,
        "0.14": shapes + p2p + "grad_finalize_pgs=",
        "0.15": shapes + p2p + "pg_collection=",
        "0.16": shapes + "p2p_communicator= pg_collection= force_all_reduce=",
    }


def _forward_step() -> Rows:
    core = _DATA + "num_microbatches " + _STORE + "config "
    options = "collect_non_loss_data= checkpoint_activations_microbatch= "
    first = options + "is_first_microbatch= "
    current = first + "current_microbatch= "
    return {
        "A": None,
        "B": _DATA + "input_tensor losses_reduced",
        "D0": _DATA + _STORE + "collect_non_loss_data=",
        "D2": _DATA + _STORE + "timers collect_non_loss_data=",
        "23.04": f"{_DATA}num_microbatches {_STORE}timers collect_non_loss_data= "
        "autocast_dtype= enable_autocast=",
        "0.4": core + options,
        "0.5": core + first,
        "0.7": core + current,
        "0.9": core + current + "encoder_decoder_xattn=",
        "0.13": core + current + "encoder_decoder_xattn= vp_stage=",
        "0.14": core + "cp_group_size " + current + "vp_stage= is_last_stage=",
    }


def _with_groups(base: str) -> str:
    return base + "pg_collection= p2p_communicator="


SIGNATURES: dict[str, Rows] = {
    "forward_backward_no_pipelining": _schedule(only_one=True),
    "forward_backward_pipelining": {"A": _DATA + "optimizer timers", "B": None},
    "forward_backward_pipelining_without_interleaving": _schedule(only_one=False),
    "forward_backward_pipelining_with_interleaving": _schedule(only_one=False),
    "get_forward_backward_func": {
        "A": None,
        "B": "",
        "0.16": "pp_size= vp_size=",
        "0.19": "pp_size= vp_size= schedule_pg_collection=",
    },
    "forward_step": _forward_step(),
    "backward_step": {
        "A": "optimizer model " + _BACK,
        "B": "optimizer " + _BACK,
        "D2": "optimizer " + _BACK + "timers",
        "23.04": f"grad_scaler {_BACK}model_type timers deallocate_pipeline_outputs=",
        "0.4": _BACK + "model_type config",
        "0.14": _BACK + "model_type config pipeline_model_parallel_size=",
        "0.15": _BACK + "model_type config",
        "0.17": _BACK + "config",
    },
    "train_step": {
        "A": _DATA + "optimizer lr_scheduler",
        "D0": _DATA + "optimizer opt_param_scheduler",
        "0.4": _DATA + "optimizer opt_param_scheduler config",
        "0.14": _DATA + "optimizer opt_param_scheduler config forward_backward_func",
        "0.16": f"{_DATA}optimizer opt_param_scheduler config forward_backward_func "
        "iteration=",
        "0.19": _with_groups(
            f"{_DATA}optimizer opt_param_scheduler config forward_backward_func "
            "iteration= "
        ),
    },
    "train": {
        "A": "forward_step_func model optimizer lr_scheduler " + _ITERATORS,
        **{
            since: "forward_step_func model optimizer opt_param_scheduler "
            + _ITERATORS
            + rest
            for since, rest in {
                "D0": _PROCESS,
                "0.4": _CONFIG,
                "0.7": _CONFIG + "checkpointing_context",
                "0.10": _CONFIG + "checkpointing_context non_loss_data_func",
                "0.16": f"{_CONFIG}checkpointing_context non_loss_data_func "
                "inference_model=",
                "0.19": f"{_CONFIG}checkpointing_context non_loss_data_func "
                "inference_model= p2p_communicator= pg_collection=",
            }.items()
        },
    },
    "evaluate": {
        "A": _DATA + "verbose=",
        "D0": _DATA + _PROCESS + "verbose=",
        "0.4": _DATA + _CONFIG + "verbose=",
        "0.10": _DATA + _CONFIG + "verbose= non_loss_data_func=",
        "0.14": _DATA + _CONFIG + "verbose= non_loss_data_func= eval_iters=",
        "0.19": _with_groups(
            _DATA + _CONFIG + "verbose= non_loss_data_func= eval_iters= "
        ),
    },
    "evaluate_and_print_results": {
        since: "prefix " + _DATA + "iteration " + rest
        for since, rest in {
            "A": "verbose=",
            "D0": _PROCESS + "verbose=",
            "23.06": _PROCESS + _OUTPUT,
            "0.4": _CONFIG + _OUTPUT,
            "0.10": _CONFIG + _OUTPUT + "non_loss_data_func=",
            "0.19": _with_groups(_CONFIG + _OUTPUT + "non_loss_data_func= "),
        }.items()
    },
    "training_log": {
        since: "loss_dict total_loss_dict learning_rate " + rest
        for since, rest in {
            "A": "iteration " + _LOG,
            "B": "iteration " + _NORMS,
            "0.6": "decoupled_learning_rate iteration " + _NORMS,
            "0.16": f"iteration {_NORMS}max_attention_logit pg_collection= "
            "is_first_iteration=",
            "0.18": f"iteration {_NORMS}max_attention_logit pg_collection= "
            "is_first_iteration= seqlen_squared_sum_in_batch= "
            "total_real_tokens_in_batch=",
        }.items()
    },
    "setup_model_and_optimizer": {
        "A": "model_provider_func",
        "C": "model_provider_func model_type",
        "D0": _SETUP,
        "0.9": _SETUP + "checkpointing_context=",
        "0.16": "model_provider_func model_type checkpointing_context=",
        "0.19": "model_type model_provider_func= checkpointing_context= * "
        "cfg_container= pg_collection=",
    },
    "get_megatron_optimizer": {
        "A": "model",
        "D0": "model " + _DECAY,
        "0.5": "model_chunks " + _DECAY,
        "0.6": "config model_chunks " + _DECAY,
        "0.12": f"config model_chunks {_DECAY}use_gloo_process_groups=",
        "0.14": f"config model_chunks {_DECAY}use_gloo_process_groups= "
        "default_skip_embedding_weight_decay= grad_comm_pgs= model_comm_pgs=",
        "0.15": f"config model_chunks {_DECAY}use_gloo_process_groups= "
        "default_skip_embedding_weight_decay= pg_collection=",
        "0.16": "config model_chunks config_overrides= use_gloo_process_groups= "
        "pg_collection= dump_param_to_param_group_map=",
    },
    "finetune": {
        since: "train_valid_datasets_provider model_provider " + rest
        for since, rest in {
            "A": "forward_step= " + _TUNE,
            "B": "forward_step= " + _TUNE + "task_collate_fn=",
            "C": "model_type= forward_step= " + _TUNE + "task_collate_fn=",
        }.items()
    },
    "_train": {
        "A": "model optimizer lr_scheduler " + _LOADERS,
        "D0": "model optimizer opt_param_scheduler " + _LOADERS,
    },
}
