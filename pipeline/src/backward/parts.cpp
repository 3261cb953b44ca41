// SPDX-License-Identifier: Apache-2.0
// The only file that knows torch's generated nodes: their header is large.
#include <backward/parts.h>

#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <typeinfo>

namespace torch_sm3::pipeline {
namespace {

namespace generated = torch::autograd::generated;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

template <class... Saved>
bool none_hooked(const Saved&... saved) {
  static_assert(sizeof...(saved) > 0);
  return (!saved.has_hooks() && ...);
}

bool plain(const generated::MmBackward0& node) {
  return none_hooked(node.self_, node.mat2_);
}
bool plain(const generated::AddmmBackward0& node) {
  return none_hooked(node.mat1_, node.mat2_);
}
bool plain(const generated::BmmBackward0& node) {
  return none_hooked(node.self_, node.mat2_);
}
bool plain(const generated::BaddbmmBackward0& node) {
  return none_hooked(node.batch1_, node.batch2_);
}
bool plain(const generated::AddbmmBackward0& node) {
  return none_hooked(node.batch1_, node.batch2_);
}
bool plain(const generated::MvBackward0& node) {
  return none_hooked(node.self_, node.vec_);
}
bool plain(const generated::AddmvBackward0& node) {
  return none_hooked(node.mat_, node.vec_);
}
bool plain(const generated::LinearBackward0& node) {
  return none_hooked(node.input_, node.weight_);
}
bool plain(const generated::ConvolutionBackward0& node) {
  return none_hooked(node.input_, node.weight_);
}
bool plain(const generated::EmbeddingBackward0& node) {
  return none_hooked(node.indices_);
}

enum class Kind { kOther, kHooked, kPlain };

template <class... Kinds>
Kind kind_among(const Node& node) {
  Kind kind = Kind::kOther;
  const auto compare = [&]<class T>(const T* /*tag*/) {
    if (typeid(node) == typeid(T)) {
      kind = plain(static_cast<const T&>(node)) ? Kind::kPlain : Kind::kHooked;
    }
  };
  (compare(static_cast<const Kinds*>(nullptr)), ...);
  return kind;
}

Kind kind_of(const Node& node) {
  return kind_among<
      generated::MmBackward0,
      generated::AddmmBackward0,
      generated::BmmBackward0,
      generated::BaddbmmBackward0,
      generated::AddbmmBackward0,
      generated::MvBackward0,
      generated::AddmvBackward0,
      generated::LinearBackward0,
      generated::ConvolutionBackward0,
      generated::EmbeddingBackward0>(node);
}

} // namespace

bool is_built_in(const Node& node) {
  // By the name that the C++ ABI gives to the namespace of generated nodes:
  // they have no base class of their own, and Python's nodes are of a library
  // that this one does not link.
  return std::string_view(typeid(node).name())
      .starts_with("N5torch8autograd9generated");
}

bool runs_in_parts(const Node& node) {
  return kind_of(node) == Kind::kPlain;
}

bool is_layer(const Node& node) {
  return kind_of(node) != Kind::kOther;
}

bool is_embedding(const Node& node) {
  return typeid(node) == typeid(generated::EmbeddingBackward0) ||
         typeid(node) == typeid(generated::EmbeddingBagBackward0);
}

bool keeps_no_result(const Node& node) {
  // A node that is missing here costs nothing but the storage of an output to
  // which someone else still holds on.
  static constexpr std::array<std::string_view, 24> kNames{
      "AddBackward0",
      "AddbmmBackward0",
      "AddmmBackward0",
      "BaddbmmBackward0",
      "BmmBackward0",
      "CatBackward0",
      "CloneBackward0",
      "ConvolutionBackward0",
      "DivBackward0",
      "EmbeddingBackward0",
      "FusedRmsNormBackward0",
      "GeluBackward0",
      "LinearBackward0",
      "MmBackward0",
      "MulBackward0",
      "NativeBatchNormBackward0",
      "NativeDropoutBackward0",
      "NativeGroupNormBackward0",
      "NativeLayerNormBackward0",
      "SiluBackward0",
      "StackBackward0",
      "SubBackward0",
      "ToCopyBackward0",
      "UnsafeViewBackward0"};
  return is_built_in(node) &&
         std::ranges::find(kNames, node.name()) != kNames.end();
}

} // namespace torch_sm3::pipeline
