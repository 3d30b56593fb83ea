#include "dispatch/lower.h"

#include "util/check.h"

namespace torch_tpu {

namespace {

Lowering g_lowering;

std::optional<pjrt::Executable> compile(ProgramSpec& spec) {
  const Runtime& runtime = Runtime::get();
  if (!spec.serialized.empty()) return runtime.client().deserialize(spec.serialized);
  if (spec.stablehlo.empty()) return std::nullopt;
  return runtime.client().compile(spec.stablehlo, runtime.compile_options());
}

}  // namespace

void install_lowering(Lowering lowering) { g_lowering = std::move(lowering); }

ProgramSpec lower_call(const Call& call) { return g_lowering.lower(call); }

ProgramSpec lower_reshape(c10::ScalarType dtype, DimsRef from, DimsRef to) {
  return g_lowering.reshape(dtype, from, to);
}

ProgramRef compile_spec(ProgramSpec spec) {
  ProgramRef program;
  std::string store_key, serialized;
  Runtime::without_gil([&] {
    try {
      std::optional<pjrt::Executable> executable = compile(spec);
      if (executable && spec.serialized.empty() && !spec.store_key.empty()) {
        store_key = spec.store_key;
        serialized = executable->serialize();
      }
      program = c10::make_intrusive<Program>(std::move(spec), std::move(executable));
    } catch (const pjrt::Error& e) {
      throw_failure({e.code, c10::str("[", spec.name, "] the program could not be compiled: ", e.what())});
    }
  });
  if (!store_key.empty()) g_lowering.store(store_key, serialized);
  return program;
}

}  // namespace torch_tpu
