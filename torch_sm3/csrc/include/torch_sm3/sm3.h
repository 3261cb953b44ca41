// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// SM3, whole.

#include <torch_sm3/sm3_ops.h>
#include <torch_sm3/sm3_optimizer.h>
#include <torch_sm3/sm3_schedule.h>
