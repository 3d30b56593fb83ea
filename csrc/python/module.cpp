// The extension module torch_tpu._C. torch_tpu/runtime is its only importer; torch_tpu/_C.pyi describes it.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "cache/executable_cache.h"
#include "dispatch/lower.h"
#include "dispatch/run_op.h"
#include "hooks/hooks.h"
#include "python/errors.h"
#include "python/lowering.h"
#include "rng/generator.h"
#include "storage/dtype.h"
#include "storage/memory_table.h"
#include "storage/transfer.h"
#include "trace/deferred.h"
#include "trace/mode.h"

namespace py = pybind11;

namespace torch_tpu {

namespace {

PluginSpec plugin_spec_of(const py::object& o) {
  PluginSpec spec{o.attr("path").cast<std::string>(),
                  o.attr("kind").cast<std::string>(),
                  {},
                  o.attr("host_kernels").cast<bool>()};
  for (const auto& [name, value] : o.attr("options").cast<py::dict>()) {
    const auto key = name.cast<std::string>();
    if (py::isinstance<py::bool_>(value)) {
      spec.options[key] = value.cast<bool>();
    } else if (py::isinstance<py::int_>(value)) {
      spec.options[key] = value.cast<int64_t>();
    } else if (py::isinstance<py::float_>(value)) {
      spec.options[key] = value.cast<float>();
    } else {
      spec.options[key] = value.cast<std::string>();
    }
  }
  return spec;
}

// `plugin_spec()` is called at first use of the device, `expected_devices()` whenever PyTorch asks whether
// there is one.
void install_runtime(py::object plugin_spec, py::object expected_devices) {
  auto* const fns = new std::array<py::object, 2>{std::move(plugin_spec), std::move(expected_devices)};
  Runtime::install(
      [fns] {
        PluginSpec spec;
        with_python([&] { spec = plugin_spec_of((*fns)[0]()); });
        return spec;
      },
      &without_gil);
  register_hooks([fns] {
    if (Runtime::initialized() && !Runtime::forked()) return Runtime::get().device_count();
    int n = 0;
    with_python([&] { n = (*fns)[1]().cast<int>(); });
    return n;
  });
}

py::dict device_info(int index) {
  Runtime& runtime = Runtime::get();
  const pjrt::Device& device = runtime.device(index).device;
  py::dict info;
  info["kind"] = device.kind;
  info["id"] = device.id;
  info["description"] = device.debug_text;
  info["platform"] = runtime.client().platform_name();
  info["platform_version"] = runtime.client().platform_version();
  info["plugin"] = runtime.spec().path;
  info["host_addressable"] = runtime.client().host_addressable();
  const auto& version = runtime.client().api()->pjrt_api_version;
  info["api_version"] = py::make_tuple(version.major_version, version.minor_version);
  info["compile_options"] = py::bytes(runtime.compile_options());
  return info;
}

py::dict plugin_info(const std::string& path) {
  const PJRT_Api* api = pjrt::load_plugin(path);
  static const std::pair<PJRT_Extension_Type, const char*> names[] = {
      {PJRT_Extension_Type_Profiler, "Profiler"},
      {PJRT_Extension_Type_Stream, "Stream"},
      {PJRT_Extension_Type_Layouts, "Layouts"},
      {PJRT_Extension_Type_FFI, "FFI"},
      {PJRT_Extension_Type_RawBuffer, "RawBuffer"},
      {PJRT_Extension_Type_MemoryDescriptions, "MemoryDescriptions"},
      {PJRT_Extension_Type_PhaseCompile, "PhaseCompile"},
      {PJRT_Extension_Type_HostAllocator, "HostAllocator"},
      {PJRT_Extension_Type_Callback, "Callback"},
      {PJRT_Extension_Type_CrossHostTransfers, "CrossHostTransfers"},
  };
  py::list extensions;
  for (const auto& [type, name] : names) {
    if (pjrt::find_extension(api, type) != nullptr) extensions.append(name);
  }
  py::dict info;
  info["api_version"] =
      py::make_tuple(api->pjrt_api_version.major_version, api->pjrt_api_version.minor_version);
  info["extensions"] = extensions;
  return info;
}

py::dict cache_stats() {
  const CacheStats s = ExecutableCache::get().stats();
  py::dict out;
  out["programs"] = s.programs;
  out["code_bytes"] = s.code_bytes;
  out["hits"] = s.hits;
  out["misses"] = s.misses;
  out["evictions"] = s.evictions;
  const CompileCounts c = compile_counts();
  out["compiled"] = c.compiled;
  out["loaded"] = c.loaded;
  return out;
}

// Compiles and runs a module on CPU tensors: the lowering tests' way to run a rule without the dispatcher.
std::vector<at::Tensor> run_stablehlo(const std::string& text, const std::vector<at::Tensor>& inputs,
                                      const std::vector<at::Tensor>& outputs) {
  Runtime& runtime = Runtime::get();
  DeviceState& device = runtime.device(0);
  const py::gil_scoped_release release;
  const pjrt::Executable executable = runtime.client().compile(text, runtime.compile_options());
  std::vector<BufferRef> held;
  std::vector<PJRT_Buffer*> args, raw(outputs.size());
  for (const at::Tensor& t : inputs) {
    held.push_back(buffer_from_host(device, t.contiguous().const_data_ptr(), t.scalar_type(), t.sizes()));
    args.push_back(held.back()->handle());
  }
  const auto done = executable.launch(
      {.device = device.device.handle, .args = args.data(), .num_args = args.size(), .outs = raw.data()});
  for (size_t i = 0; i < raw.size(); ++i) {
    DeviceBuffer out(device, pjrt::Buffer(runtime.client().api(), raw[i]), outputs[i].scalar_type(),
                     outputs[i].sizes());
    buffer_to_host(out, outputs[i].mutable_data_ptr());
  }
  return outputs;
}

py::dict compile_for_topology(const std::string& plugin, const std::string& topology,
                              const std::string& text) {
  pjrt::ProgramStats s;
  {
    const py::gil_scoped_release release;
    s = pjrt::compile_for_topology(pjrt::load_plugin(plugin), topology, text,
                                   pjrt::compile_options(false, {}), nullptr);
  }
  py::dict out;
  out["code_bytes"] = s.code_bytes;
  out["argument_bytes"] = s.argument_bytes;
  out["output_bytes"] = s.output_bytes;
  out["alias_bytes"] = s.alias_bytes;
  out["temp_bytes"] = s.temp_bytes;
  return out;
}

// (dtype, dims) of the buffer behind a tensor, or None before the first write: for tests and debugging.
py::object storage_form(const at::Tensor& t) {
  const BufferRef buffer = Storage::of(t).buffer();
  if (buffer == nullptr) return py::none();
  return py::make_tuple(
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(buffer->dtype))),
      std::vector<int64_t>(buffer->dims.begin(), buffer->dims.end()));
}

void flush_all(FlushReason reason) {
  if (!Runtime::initialized()) return;
  for (int i = 0; i < Runtime::get().device_count(); ++i) flush(Runtime::get().device(i), reason);
}

void bind_runtime(py::module_& m) {
  m.def("install_runtime", [](py::object spec, py::object expected) {
    translated([&] { install_runtime(std::move(spec), std::move(expected)); });
  });
  m.def("register_kernels", [] { return translated([] { return register_kernels(); }); });
  m.def("is_initialized", &Runtime::initialized);
  m.def("is_forked", &Runtime::forked);
  m.def("init", [] { translated([] { Runtime::get(); }); });
  m.def("expected_device_count", [] {
    return translated([] { return static_cast<int>(at::detail::getPrivateUse1Hooks().deviceCount()); });
  });
  m.def("device_count", [] { return translated([] { return Runtime::get().device_count(); }); });
  m.def("device_info", [](int i) { return translated([&] { return device_info(i); }); });
  m.def("plugin_info", [](const std::string& path) { return translated([&] { return plugin_info(path); }); });
  m.def("synchronize_all", [] {
    translated([] {
      if (!Runtime::initialized()) return;
      flush_all(FlushReason::kSynchronize);
      without_gil([] { Runtime::get().synchronize_all(); });
    });
  });
  m.def("seed_all", &seed_all);
  m.def("default_generator", [](int i) {
    return translated([&] { return default_generator(static_cast<c10::DeviceIndex>(i)); });
  });
}

py::list memory_snapshot() {
  py::list out;
  for (const Storage::Live& live : Storage::snapshot()) {
    py::dict entry;
    entry["device"] = static_cast<int>(live.device->index);
    entry["address"] = reinterpret_cast<uintptr_t>(live.address);
    entry["storage_bytes"] = live.bytes;
    const BufferRef& buffer = live.buffer;
    entry["state"] = buffer == nullptr   ? "unwritten"
                     : buffer->pending() ? "recorded"
                     : buffer->failed()  ? "failed"
                                         : "allocated";
    if (buffer != nullptr) {
      entry["array"] = reinterpret_cast<uintptr_t>(buffer.get());
      entry["bytes"] = buffer->pending() ? 0 : buffer->bytes;
      entry["dtype"] =
          py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(buffer->dtype)));
      entry["shape"] = py::tuple(py::cast(std::vector<int64_t>(buffer->dims.begin(), buffer->dims.end())));
      entry["op"] = buffer->op;
    }
    out.append(entry);
  }
  return out;
}

void bind_cache(py::module_& m) {
  m.def("memory_snapshot", &memory_snapshot);
  m.def("memory_table", &memory_table);
  m.def("cache_stats", &cache_stats);
  m.def("clear_cache", [] { ExecutableCache::get().clear(); });
  m.def("set_max_programs", [](size_t n) { ExecutableCache::get().set_max_programs(n); });
  m.def("set_cpu_fallback", [](int policy) { set_cpu_fallback(static_cast<CpuFallback>(policy)); });
  m.def("cpu_fallback_counts", &cpu_fallback_counts);
}

py::dict stats_of_deferred() {
  static constexpr std::array<const char*, static_cast<size_t>(FlushReason::kCount)> kReasons = {
      "read", "synchronize", "event", "step", "repeat", "nodes", "bytes", "mode"};
  const DeferredStats s = deferred_stats();
  py::dict out, flushes;
  for (size_t i = 0; i < kReasons.size(); ++i) flushes[kReasons[i]] = s.flushes[i];
  out["recorded"] = s.recorded;
  out["launched"] = s.launched;
  out["dead_values"] = s.dead;
  out["flushes"] = flushes;
  return out;
}

// What the compiler says of these options, asked with a program that does nothing; empty: it takes them.
std::string compile_options_error(const std::map<std::string, std::string>& flags) {
  const Runtime& runtime = Runtime::get();
  const py::gil_scoped_release release;
  try {
    runtime.client().compile(
        "module @nothing {\nfunc.func public @main(%x: tensor<f32>) -> tensor<f32> {\nreturn %x : "
        "tensor<f32>\n}\n}\n",
        runtime.compile_options(flags));
    return {};
  } catch (const pjrt::Error& e) {
    return e.what();
  }
}

void bind_compiler_options(py::module_& m) {
  m.def("compiler_options", &compiler_options);
  m.def("set_compiler_options", [](int64_t number) {
    translated(
        [&] { flush_all(FlushReason::kMode); });  // what is recorded keeps the options it was called with
    set_compiler_options(number);
  });
  m.def("compile_options", [](const std::map<std::string, std::string>& flags) {
    return translated([&] { return py::bytes(Runtime::get().compile_options(flags)); });
  });
  m.def("compile_options_error", [](const std::map<std::string, std::string>& flags) {
    return translated([&] { return compile_options_error(flags); });
  });
  m.def("keep_optimized", &keep_optimized);
}

void bind_modes(py::module_& m) {
  m.def("eager_mode", [] { return static_cast<int>(eager_mode()); });
  m.def("set_process_mode", [](int mode) {
    translated([&] { flush_all(FlushReason::kMode); });
    set_process_mode(static_cast<EagerMode>(mode));
  });
  m.def("thread_mode", []() -> std::optional<int> {
    const auto mode = thread_mode();
    return mode ? std::optional<int>(static_cast<int>(*mode)) : std::nullopt;
  });
  m.def("set_thread_mode", [](std::optional<int> mode) {
    translated([&] { flush_all(FlushReason::kMode); });
    set_thread_mode(mode ? std::optional(static_cast<EagerMode>(*mode)) : std::nullopt);
  });
  m.def("flush_step", [] { translated([] { flush_all(FlushReason::kStep); }); });
  m.def("deferred_stats", &stats_of_deferred);
}

void bind_tools(py::module_& m) {
  m.def("run_stablehlo",
        [](const std::string& text, const std::vector<at::Tensor>& in, const std::vector<at::Tensor>& out) {
          return translated([&] { return run_stablehlo(text, in, out); });
        });
  m.def("compile_for_topology",
        [](const std::string& plugin, const std::string& topology, const std::string& text) {
          return translated([&] { return compile_for_topology(plugin, topology, text); });
        });
  m.def("storage_form", [](const at::Tensor& t) { return translated([&] { return storage_form(t); }); });
}

}  // namespace

}  // namespace torch_tpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  torch_tpu::bind_runtime(m);
  torch_tpu::bind_cache(m);
  torch_tpu::bind_modes(m);
  torch_tpu::bind_compiler_options(m);
  torch_tpu::bind_tools(m);
  torch_tpu::bind_lowering(m);
  torch_tpu::bind_bounds(m);
}
