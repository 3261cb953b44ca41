// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Covers: which elements of a parameter share a number of SM3's state.

#include <torch_sm3/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::optim {

/// Says which elements of a parameter share a number.
///
/// The parameter's elements, in logical order, are seen in the sizes of a
/// `view`; each group of view axes has one accumulator, with a number for each
/// index along these axes: the bound of all elements with that index. Finer
/// sets give tighter bounds and take more memory.
///
/// ```cpp
/// SM3Options(0.1).cover("diagonal");                     // Adagrad
/// SM3Options(0.1).cover(Cover::heads(0, 16));            // heads by
/// themselves SM3Options(0.1).cover(Cover::merge({{0}, {1, 2, 3}})); //
/// convolution
/// ```
class TORCH_SM3_API Cover {
 public:
  using Axes = std::vector<std::vector<int64_t>>;

  /// Names a cover: "auto" (one vector per dimension, or Adagrad where that is
  /// not larger), "standard" (one vector per dimension) or "diagonal".
  Cover(const char* name = "auto");
  Cover(const std::string& name);

  /// One vector per dimension.
  static Cover standard();
  /// One number per element: Adagrad.
  static Cover diagonal();
  /// One vector per group of neighbouring dimensions, for example {{0}, {1, 2,
  /// 3}} for the weight of a convolution.
  static Cover merge(Axes groups);
  /// Splits `dim` into `n` heads, each with vectors of its own.
  static Cover heads(int64_t dim, int64_t n);
  /// Splits `dim` into blocks of `size`, each with vectors of its own.
  static Cover blocks(int64_t dim, int64_t size);

  /// One accumulator per group of dimensions, any of them.
  static Cover axes(Axes groups);
  /// One accumulator per group of axes of a view.
  /// \param sizes  their product is the number of elements; one may be -1
  /// \param groups of distinct axes of the view; none stands for each axis by
  ///               itself
  static Cover view(std::vector<int64_t> sizes, Axes groups = {});

  /// Restores a cover from `kind()` and `numbers()`.
  static Cover restore(const std::string& kind, Axes numbers);

  /// How it was made: "auto", "standard", "diagonal", "merge", "heads",
  /// "blocks", "axes" or "view".
  const std::string& kind() const {
    return kind_;
  }

  /// With what, plain enough for an archive: the groups, {{dim, n}}, {{dim,
  /// size}}, or the sizes and then the groups.
  const Axes& numbers() const {
    return numbers_;
  }

  friend bool operator==(const Cover& a, const Cover& b) {
    return a.kind_ == b.kind_ && a.numbers_ == b.numbers_;
  }

 private:
  Cover(std::string kind, Axes numbers);

  std::string kind_;
  Axes numbers_;
};

} // namespace torch_sm3::optim
