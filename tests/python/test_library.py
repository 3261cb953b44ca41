# SPDX-License-Identifier: Apache-2.0
"""The library file itself: build information and the list of all operators."""

import json

import pytest
import torch

import torch_sm3
from torch_sm3 import _build_info, _ops

# Every operator of the library and the dispatch keys that it must have: the table
# of contents. CUDA is asked for only where the build has it.
OPERATORS = {
    "_adasum_loopback": ["CompositeExplicitAutograd"],
    "_memory_meter_start": ["CompositeImplicitAutograd"],
    "_memory_meter_stop": ["CompositeImplicitAutograd"],
    "adasum_all_reduce_": ["CPU", "CUDA", "Meta", "Autograd"],
    "adasum_all_reduce_.process_group": ["CPU", "CUDA", "Meta", "Autograd"],
    "adasum_coefficients": ["CPU", "CUDA", "Meta", "Autograd"],
    "adasum_combine": ["CPU", "CUDA", "Meta", "Autograd"],
    "adasum_gram": ["CPU", "CUDA", "Meta", "Autograd"],
    "adasum_pair": ["CPU", "CUDA", "Meta", "Autograd"],
    "build_info": ["CompositeImplicitAutograd"],
    "cpu_capability": ["CompositeImplicitAutograd"],
    "reversible_add": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_affine": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_affine_backward": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_affine_inverse": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_begin": ["CompositeImplicitAutograd"],
    "reversible_checksum": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_dropout": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_end": ["CompositeImplicitAutograd"],
    "reversible_grid_add": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_grid_sub": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_half_residual": ["CompositeImplicitAutograd"],
    "reversible_identity": ["CompositeImplicitAutograd"],
    "reversible_quantize": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_remember": ["CompositeImplicitAutograd"],
    "reversible_sidecar_decode": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_sidecar_encode": ["CPU", "CUDA", "Meta", "Autograd"],
    "reversible_sub": ["CPU", "CUDA", "Meta", "Autograd"],
    "sm3_accumulators": ["CompositeExplicitAutograd"],
    "sm3_maxima": ["CPU", "CUDA", "Meta"],
    "sm3_nonfinite_": ["CPU", "CUDA", "Meta"],
    "sm3_sparse_update_": ["CPU", "CUDA", "Meta"],
    "sm3_sparse_update_.tensor_lr": ["CPU", "CUDA", "Meta"],
    "sm3_update_": ["CPU", "CUDA", "Meta"],
    "sm3_update_.tensor_lr": ["CPU", "CUDA", "Meta"],
}


def registered() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {n.split("::")[1] for n in names if n.startswith("torch_sm3::")}


def test_every_operator_is_listed_here() -> None:
    assert registered() == set(OPERATORS)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operator_has_its_kernels(name: str) -> None:
    for key in OPERATORS[name]:
        if key == "CUDA" and not torch_sm3.BUILD_INFO["cuda"]:
            continue
        assert torch._C._dispatch_has_kernel_for_dispatch_key(
            f"torch_sm3::{name}", key
        ), f"{name} has no kernel for {key}"


def test_build_information_is_read_without_loading() -> None:
    info = _build_info.read_build_info()
    assert info == json.loads(_ops.build_info())
    assert torch.__version__.startswith(info["torch"])


@pytest.mark.parametrize(
    ("version", "cuda"),
    [("2.3.0", None), ("3.14.0", "13.0"), ("{built}", "1.2")],
)
def test_other_torch_is_refused_in_one_sentence(version: str, cuda: str | None) -> None:
    info = _build_info.read_build_info()
    running = version.format(built=info["torch"])
    with pytest.raises(ImportError, match=r"expected torch .* but got torch") as caught:
        _build_info.check_torch(info, running, cuda)
    assert "pip install --no-build-isolation" in str(caught.value)
    assert running in str(caught.value) and "\n" not in str(caught.value)


def test_missing_library_says_what_to_type(tmp_path) -> None:
    with pytest.raises(ImportError, match="pip install --no-build-isolation"):
        _build_info.read_build_info(tmp_path / "libtorch_sm3.so")
    (tmp_path / "other.so").write_bytes(b"\x7fELF")
    with pytest.raises(ImportError, match="expected build information"):
        _build_info.read_build_info(tmp_path / "other.so")
