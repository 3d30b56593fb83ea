#include "dispatch/fallback.h"

#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>

#include <map>
#include <mutex>

#include "dispatch/run_op.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

std::atomic<CpuFallback> g_policy{CpuFallback::kWarn};
std::mutex g_mutex;  // guards the counts
std::map<std::string, int64_t> g_counts;

}  // namespace

void set_cpu_fallback(CpuFallback policy) { g_policy = policy; }

std::vector<std::pair<std::string, int64_t>> cpu_fallback_counts() {
  std::lock_guard lock(g_mutex);
  return {g_counts.begin(), g_counts.end()};
}

void run_composite(OpRecord& record, torch::jit::Stack& stack) {
  const bool any = record.op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  record.op->callBoxedForDispatchKey(any ? c10::DispatchKey::CompositeExplicitAutograd
                                         : c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
                                     stack);
}

void run_functional(OpRecord& record, torch::jit::Stack& stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(record.functional.c_str(),
                                                                 record.functional_overload.c_str());
  const size_t n = record.args.size();
  torch::jit::Stack inputs, outs;
  for (size_t i = 0; i < n; ++i) {
    (record.args[i].written ? outs : inputs).push_back(stack[stack.size() - n + i]);
  }
  op.callBoxed(inputs);
  for (size_t i = 0; i < outs.size(); ++i) {
    const at::Tensor& out = outs[i].toTensor();
    const at::Tensor& result = inputs.at(i).toTensor();
    at::native::resize_output(out, result.sizes());
    out.copy_(result);
  }
  torch::jit::drop(stack, n);
  for (c10::IValue& out : outs) stack.push_back(std::move(out));
}

void run_on_host(OpRecord& record, torch::jit::Stack& stack) {
  at::native::cpu_fallback(*record.op, &stack, /*error_on_views=*/false);
}

void run_on_cpu(OpRecord& record, torch::jit::Stack& stack) {
  const CpuFallback policy = g_policy;
  TORCH_CHECK_NOT_IMPLEMENTED(policy != CpuFallback::kError, "[", record.name,
                              "] no lowering rule, no decomposition and no composite kernel.",
                              Fix("set TORCH_TPU_CPU_FALLBACK=warn to run this op on the CPU."),
                              "\n  (TPU-E101, see docs/errors.md)");
  bool first = false;
  {
    std::lock_guard lock(g_mutex);
    first = g_counts[record.name]++ == 0;
  }
  if (first && policy == CpuFallback::kWarn) {
    TORCH_WARN(
        "[", record.name,
        "] has no lowering for \"tpu\" and runs on the CPU: its inputs are copied to the host and "
        "its results back. TORCH_TPU_CPU_FALLBACK=error makes this an error, silent hides this warning.");
  }
  run_on_host(record, stack);
}

}  // namespace torch_tpu
