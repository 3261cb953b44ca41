// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// SM3, memory-efficient adaptive optimization (arXiv 1901.11150): Adagrad
/// whose per-element sums are replaced by one number per row, column, ... of a
/// tensor. A matrix of m x n elements keeps m + n numbers.

#include <torch_sm3/sm3_ops.h>
#include <torch_sm3/sm3_optimizer.h>
#include <torch_sm3/sm3_schedule.h>
