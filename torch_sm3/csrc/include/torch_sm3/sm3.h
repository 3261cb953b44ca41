// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// SM3, whole.

#include <torch_sm3/sm3_ops.h>
