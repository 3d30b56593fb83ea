#include "dispatch/run_op.h"

#include <torch/library.h>

#include <unordered_set>

#include "cache/executable_cache.h"
#include "dispatch/checks.h"
#include "dispatch/fallback.h"
#include "dispatch/launch.h"
#include "dispatch/lower.h"

namespace torch_tpu {

namespace {

// Kernels of their own: metadata, and what moves data. csrc/dispatch/{factories,views,copy}.cpp.
const std::unordered_set<std::string>& hand_written() {
  static const std::unordered_set<std::string> names = {
      "aten::empty.memory_format",
      "aten::empty_strided",
      "aten::new_empty_strided",
      "aten::as_strided",
      "aten::view",
      "aten::_reshape_alias",
      "aten::alias",
      "aten::detach",
      "aten::unfold",
      "aten::resize_",
      "aten::set_.source_Storage",
      "aten::set_.source_Tensor",
      "aten::set_.source_Storage_storage_offset",
      "aten::set_",
      "aten::_copy_from",
      "aten::_copy_from_and_resize",
      "aten::_local_scalar_dense",
      "aten::copy_",
      "aten::_to_copy",
      "aten::record_stream",
      "aten::_pin_memory",
      "aten::is_pinned",
      "aten::equal",
      "aten::is_set_to",
      "aten::set_.source_Tensor_storage_offset",
      "aten::resize_as_",
      "aten::_resize_output_",
      "aten::_resize_output",
      "aten::lift_fresh",
      "aten::lift",
      "aten::empty_like",
      "aten::_unsafe_view",
      "aten::clone",
      "aten::_has_compatible_shallow_copy_type",
      // In-place metadata: PyTorch's composite kernels.
      "aten::as_strided_",
      "aten::squeeze_",
      "aten::squeeze_.dim",
      "aten::squeeze_.dims",
      "aten::unsqueeze_",
      "aten::t_",
      "aten::transpose_",
      "aten::detach_",
      "aten::set_data",
      "aten::result_type",
      "aten::_has_same_storage_numel",
      "aten::_cudnn_init_dropout_state",
  };
  return names;
}

// Families of other backends and layouts.
bool is_foreign(const std::string& name) {
  static const char* const parts[] = {"mkldnn", "cudnn",     "miopen",    "sparse",      "_nested", "fbgemm",
                                      "_test_", "quantized", "_coalesce", "::to_padded", "_cuda",   "_mps"};
  for (const char* part : parts) {
    if (name.find(part) != std::string::npos) return true;
  }
  return name.find("quantize") != std::string::npos && name.find("fake_quantize") == std::string::npos;
}

// Overloads that compute: their kernel is run_op.
bool computes(const c10::OperatorHandle& op, const std::string& name) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
  if (hand_written().count(name) != 0 || is_foreign(name)) return false;
  const c10::FunctionSchema& schema = op.schema();
  bool tensors = false;
  for (const c10::Argument& r : schema.returns()) {
    if (r.alias_info() != nullptr && !r.alias_info()->isWrite()) return false;  // a view
    tensors |= r.type()->str().find("Tensor") != std::string::npos;
  }
  for (const c10::Argument& a : schema.arguments()) {
    tensors |= a.alias_info() != nullptr && a.alias_info()->isWrite();
  }
  return tensors;
}

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(OpRecord& record) : record_(record) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    run_op(record_, *stack);
  }

 private:
  OpRecord& record_;
};

// Found by the key of the call, else made by `lower`; compiled unless it will only be recorded.
template <class Lower>
ProgramRef program_of(const Call& call, const Lower& lower) {
  ExecutableCache& cache = ExecutableCache::get();
  const size_t hash = call.key.hash();
  if (ProgramRef found = cache.find(call.key, hash)) return found;
  return cache.find_or_make(call.key, hash, [&] {
    ProgramSpec spec = lower(call);
    return call.deferred ? keep_spec(std::move(spec)) : compile_spec(std::move(spec));
  });
}

}  // namespace

void run_op(OpRecord& record, torch::jit::Stack& stack) {
  if (record.state.load(std::memory_order_acquire) == OpRecord::kUnknown) describe_once(record);
  const OpRecord::State state = record.state.load(std::memory_order_relaxed);
  if (record.check != ValueCheck::kNone) check_values(record, stack);
  if (state == OpRecord::kComposite) return run_composite(record, stack);
  if (state == OpRecord::kCpu) return run_on_cpu(record, stack);
  if (state == OpRecord::kHost) return run_on_host(record, stack);
  if (state == OpRecord::kFunctional) return run_functional(record, stack);
  if (record.is_foreach && spans_devices(record, stack)) return run_composite(record, stack);
  if (record.checks_bounds && eager_mode() == EagerMode::kDebug) check_bounds(record, stack);
  if (record.fills_output_size) fill_output_size(record, stack);
  if (record.fills_minlength) fill_minlength(record, stack);
  if (record.expands_masks) expand_masks(record, stack);
  for (;;) {
    Call call(record, stack);
    if (call.in_turn) return run_composite(record, stack);
    const ProgramRef program = program_of(call, lower_call);
    switch (program->spec.rung) {
      case ProgramSpec::kProgram:
        if (launch(call, program)) return;
        break;  // a storage changed under us: once more
      case ProgramSpec::kComposite:
        return run_composite(record, stack);
      case ProgramSpec::kCpu:
        return run_on_cpu(record, stack);
    }
  }
}

void run_graph(OpRecord& record, torch::jit::Stack& stack,
               const std::function<ProgramSpec(const Call&)>& lower) {
  for (;;) {
    Call call(record, stack);
    if (launch(call, program_of(call, lower))) return;  // else a storage changed under us: once more
  }
}

int register_kernels() {
  static auto* library =  // never destroyed: the dispatcher outlives static destruction
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  int count = 0;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    const std::string full = c10::toString(name);
    if (!op || !computes(*op, full)) continue;
    library->impl(full.c_str() + 6,
                  torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(record_of(*op))));
    ++count;
  }
  return count;
}

}  // namespace torch_tpu
