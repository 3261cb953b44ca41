// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Everything that torch_sm3 offers to C++ programs.

#include <torch_sm3/distributed.h>
#include <torch_sm3/library.h>
#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/runtime.h>
#include <torch_sm3/pipeline/transport.h>
#include <torch_sm3/reversible/affine.h>
#include <torch_sm3/reversible/call.h>
#include <torch_sm3/reversible/checksum.h>
#include <torch_sm3/reversible/dropout.h>
#include <torch_sm3/reversible/grid.h>
#include <torch_sm3/reversible/modules.h>
#include <torch_sm3/reversible/remember.h>
#include <torch_sm3/reversible/residual.h>
#include <torch_sm3/reversible/sidecar.h>
#include <torch_sm3/sm3.h>
