// The ops that have a kernel without boxes: those of which training steps and generation are made.
#include "unboxed.h"

#include "device.h"

#include <ATen/Operators.h>

#include <unordered_map>

namespace lazygt {
namespace {
using Register = c10::RegistrationHandleRAII (*)(const c10::OperatorHandle&, c10::BoxedKernel);
using Kernels = std::unordered_map<std::string, Register>;

template <class Op>
c10::RegistrationHandleRAII put_into_dispatcher(const c10::OperatorHandle& op, c10::BoxedKernel boxed) {
  using Kernel = Unboxed<typename Op::schema>;
  auto function = c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(
      std::make_unique<Kernel>(op, std::move(boxed)));
  return c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), KEY, std::move(function), c10::impl::CppSignature::make<typename Op::schema>(),
      nullptr, "lazygt");
}

template <class... Op>
void add(Kernels& kernels) {
  const auto name = [](std::string op, std::string overload) {
    return op.substr(op.find("::") + 2) + (overload.empty() ? "" : "." + overload);
  };
  (kernels.emplace(name(Op::name, Op::overload_name), &put_into_dispatcher<Op>), ...);
}

namespace op = at::_ops;

const Kernels& kernels() {
  static const auto* kernels = [] {
    auto* k = new Kernels();
    // arithmetic
    add<op::add_Tensor, op::sub_Tensor, op::mul_Tensor, op::div_Tensor, op::mul_Scalar, op::div_Scalar,
        op::add_Scalar>(*k);
    add<op::add__Tensor, op::sub__Tensor, op::mul__Tensor, op::div__Tensor, op::mul__Scalar,
        op::div__Scalar>(*k);
    add<op::neg, op::exp, op::log, op::sqrt, op::rsqrt, op::reciprocal, op::abs, op::sin, op::cos, op::tanh,
        op::sigmoid, op::relu, op::silu, op::gelu>(*k);
    add<op::neg_, op::exp_, op::sqrt_, op::relu_, op::zero_, op::fill__Scalar>(*k);
    add<op::pow_Tensor_Scalar, op::clamp, op::where_self, op::threshold_backward, op::tanh_backward>(*k);
    add<op::sigmoid_backward, op::silu_backward, op::gelu_backward>(*k);
    add<op::addcmul_, op::addcdiv_, op::lerp__Scalar, op::lerp__Tensor>(*k);
    add<op::eq_Scalar, op::eq_Tensor, op::ne_Scalar, op::lt_Scalar, op::gt_Scalar>(*k);
    // matrices
    add<op::mm, op::bmm, op::addmm>(*k);
    // sums
    add<op::sum, op::sum_dim_IntList, op::mean, op::mean_dim, op::max, op::amax, op::argmax>(*k);
    // layers
    add<op::embedding, op::embedding_dense_backward, op::native_layer_norm,
        op::native_layer_norm_backward>(*k);
    add<op::_softmax, op::_softmax_backward_data, op::_log_softmax, op::_log_softmax_backward_data>(*k);
    add<op::nll_loss_forward, op::nll_loss_backward, op::bernoulli__float>(*k);
    add<op::_scaled_dot_product_flash_attention_for_cpu,
        op::_scaled_dot_product_flash_attention_for_cpu_backward>(*k);
    // copies
    add<op::clone, op::copy_, op::_to_copy, op::cat, op::stack, op::ones_like, op::zeros_like,
        op::empty_like>(*k);
    // views
    add<op::view, op::t, op::transpose_int, op::permute, op::expand, op::select_int, op::slice_Tensor,
        op::unsqueeze>(*k);
    add<op::squeeze_dim, op::_unsafe_view, op::detach, op::alias, op::unbind_int, op::split_Tensor>(*k);
    add<op::select_backward, op::slice_backward>(*k);
    // optimizers
    add<op::_foreach_add__Scalar, op::_foreach_add__List, op::_foreach_mul__Scalar,
        op::_foreach_mul__Tensor>(*k);
    add<op::_foreach_lerp__Scalar, op::_foreach_addcmul__Scalar, op::_foreach_addcdiv__Scalar>(*k);
    add<op::_foreach_addcdiv__ScalarList, op::_foreach_sqrt, op::_foreach_div__ScalarList,
        op::_foreach_div__List>(*k);
    add<op::_foreach_add_Scalar, op::_foreach_norm_Scalar, op::_foreach_div__Scalar>(*k);
    return k;
  }();
  return *kernels;
}
}  // namespace

std::vector<std::string> unboxed_ops() {
  std::vector<std::string> names;
  for (const auto& [name, _] : kernels()) names.push_back(name);
  return names;
}

bool takes_unboxed(const std::string& name) { return kernels().count(name) != 0; }

void register_unboxed(const c10::OperatorHandle& op, const std::string& name, c10::BoxedKernel boxed) {
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>();
  registered->push_back(kernels().at(name)(op, std::move(boxed)));
}
}  // namespace lazygt
