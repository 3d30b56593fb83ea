#include "dispatch/lower.h"

#include <chrono>

#include "util/check.h"

namespace torch_tpu {

namespace {

Lowering g_lowering;

std::atomic<int64_t> g_compiled{0}, g_loaded{0};
std::atomic<bool> g_keep_optimized{false};

std::optional<pjrt::Executable> load(const ProgramSpec& spec) {
  if (spec.serialized.empty()) return std::nullopt;
  try {
    pjrt::Executable executable = Runtime::get().client().deserialize(spec.serialized);
    g_loaded.fetch_add(1, std::memory_order_relaxed);
    return executable;
  } catch (const pjrt::Error&) {
    return std::nullopt;  // the plugin does not take it, or takes none: the text is there
  }
}

pjrt::Executable compile(const ProgramSpec& spec) {
  const Runtime& runtime = Runtime::get();
  try {
    const std::string& options =
        spec.compile_options.empty() ? runtime.compile_options() : spec.compile_options;
    pjrt::Executable executable = runtime.client().compile(spec.stablehlo, options);
    g_compiled.fetch_add(1, std::memory_order_relaxed);
    return executable;
  } catch (const pjrt::Error& e) {
    const std::string text = c10::str("[", spec.name, "] the program could not be compiled: ", e.what());
    if (e.code == PJRT_Error_Code_RESOURCE_EXHAUSTED) throw_failure({e.code, text});
    TORCH_TPU_CHECK(E104, false, text,
                    Fix("set TORCH_TPU_DUMP_DIR to a folder to see the program; try a newer plugin."));
  }
}

std::string serialized(const pjrt::Executable& executable) {
  try {
    return executable.serialize();
  } catch (const pjrt::Error&) {
    return {};  // optional: such a program is not kept
  }
}

}  // namespace

void keep_optimized(bool wanted) { g_keep_optimized = wanted; }

void install_lowering(Lowering lowering) { g_lowering = std::move(lowering); }

ProgramSpec lower_call(const Call& call) { return g_lowering.lower(call); }

ProgramSpec lower_reshape(c10::ScalarType dtype, DimsRef from, DimsRef to) {
  return g_lowering.reshape(dtype, from, to);
}

ProgramRef compile_spec(ProgramSpec spec) {
  std::optional<pjrt::Executable> executable;
  std::string stablehlo, store_key, bytes, optimized;
  double duration_ms = 0;
  Runtime::without_gil([&] {
    if (std::optional<pjrt::Executable> found = load(spec)) executable.emplace(std::move(*found));
    if (executable || spec.stablehlo.empty()) return;
    const auto start = std::chrono::steady_clock::now();
    executable.emplace(compile(spec));
    duration_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    if (!spec.store_key.empty()) bytes = serialized(*executable);
    if (g_keep_optimized) optimized = executable->optimized_program();
    if (!bytes.empty()) store_key = std::move(spec.store_key);
    stablehlo = std::move(spec.stablehlo);
  });
  if (!stablehlo.empty()) g_lowering.compiled(spec.name, stablehlo, store_key, bytes, optimized, duration_ms);
  ProgramRef program;
  Runtime::without_gil(
      [&] { program = c10::make_intrusive<Program>(std::move(spec), std::move(executable)); });
  return program;
}

ProgramRef keep_spec(ProgramSpec spec) { return c10::make_intrusive<Program>(std::move(spec), std::nullopt); }

CompileCounts compile_counts() { return {g_compiled.load(), g_loaded.load()}; }

}  // namespace torch_tpu
