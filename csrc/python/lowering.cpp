#include "python/lowering.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>

#include "dispatch/bounds.h"
#include "dispatch/checks.h"
#include "dispatch/lower.h"
#include "dispatch/run_op.h"
#include "python/errors.h"
#include "storage/dtype.h"
#include "trace/deferred.h"

namespace py = pybind11;

namespace torch_tpu {

namespace {

// Dispatch keys as a user's thread has them: kernels run below autograd, where BackendSelect and others are
// off.
std::optional<c10::impl::LocalDispatchKeySet> g_default_keys;

py::object dtype_object(c10::ScalarType t) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(t)));
}

at::Tensor meta_tensor(const at::Tensor& t) {
  if (!t.defined() || t.is_cpu())
    return t;  // rank-0 CPU tensors are scalars; meta kernels take them as they are
  if (t.unsafeGetTensorImpl()
          ->is_wrapped_number()) {  // Python kernels ask a number for its value, which meta has not
    at::Tensor number = at::ones({}, t.options().device(at::kCPU));
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return number;
  }
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
}

c10::IValue meta_value(const c10::IValue& v, const ArgRecord& record, const c10::Argument& arg) {
  if (v.isTensor()) return meta_tensor(v.toTensor());
  if (v.isDevice()) return c10::Device(at::kMeta);
  if (v.isGenerator()) return {};
  if (!v.isList() || record.kind != ArgRecord::kTensorList) return v;
  if (arg.type()->str().find("?") != std::string::npos) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& item : v.toListRef()) {
      list.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(meta_tensor(item.toTensor())));
    }
    return list;
  }
  c10::List<at::Tensor> list;
  for (const c10::IValue& item : v.toListRef()) list.push_back(meta_tensor(item.toTensor()));
  return list;
}

class MissCall {
 public:
  explicit MissCall(const Call& call) : call_(call) {}

  std::string name() const { return call_.record.name; }
  int64_t state() const { return call_.key.words[1]; }

  // Per schema argument: None, ("tensor", i), ("tensors", [i | None]), ("operand", i), ("operands",
  // [("operand", i) | ("value", x)]),
  // ("value", x).
  py::list args() const {
    py::list out;
    size_t tensor = 0, operand = 0;
    for (size_t i = 0; i < call_.record.args.size(); ++i) out.append(arg(i, tensor, operand));
    return out;
  }

  // (dtype, sizes, strides, slot, conj, neg, wrapped, written, plan) of each tensor argument, lists
  // flattened; plan: None or (kind, dims, [(size, step, sliced)], covers).
  py::list tensors() const {
    py::list out;
    for (const TensorArg& t : call_.tensors) {
      const at::Tensor& x = *t.tensor;
      out.append(py::make_tuple(dtype_object(x.scalar_type()), x.sizes().vec(), x.strides().vec(), t.slot,
                                x.is_conj(), x.is_neg(), x.unsafeGetTensorImpl()->is_wrapped_number(),
                                t.written, plan(t)));
    }
    return out;
  }

  // (dtype, dims) of each storage.
  py::list slots() const {
    py::list out;
    for (const Slot& s : call_.slots) {
      out.append(py::make_tuple(dtype_object(s.dtype), std::vector<int64_t>(s.dims.begin(), s.dims.end())));
    }
    return out;
  }

  // (kind, source, dtype, wrapped) of each operand; kind: float, int, tensor, start.
  py::list operands() const {
    static const char* const kinds[] = {"float", "int", "tensor", "start", "seed", "offset"};
    py::list out;
    for (const Operand& o : call_.operands) {
      py::object dtype = o.kind == Operand::kTensor ? dtype_object(o.dtype) : py::none();
      out.append(py::make_tuple(kinds[o.kind], o.source, dtype, o.wrapped));
    }
    return out;
  }

  // The arguments by name as meta tensors and values, for tracing.
  py::dict meta_args() const {
    py::dict out;
    const auto& schema = call_.record.op->schema().arguments();
    for (size_t i = 0; i < schema.size(); ++i) {
      const c10::IValue v = meta_value(call_.arg(i), call_.record.args[i], schema[i]);
      out[py::str(schema[i].name())] = static_value(v, i);
    }
    return out;
  }

  // Results of another overload on meta tensors, its arguments taken from this call by name. Raises what its
  // meta kernel raises. Thread-safe under the GIL.
  py::list meta(const std::string& op_name, const std::string& overload) const {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(op_name.c_str(), overload.c_str());
    torch::jit::Stack stack;
    for (const c10::Argument& arg : op.schema().arguments()) {
      const auto index = call_.record.op->schema().argumentIndexWithName(arg.name());
      if (index) {
        const auto i = static_cast<size_t>(*index);
        stack.push_back(meta_value(call_.arg(i), call_.record.args[i], arg));
      } else {
        TORCH_CHECK(arg.default_value(), op_name, ".", overload, " needs ", arg.name(), ", which ",
                    call_.record.name, " does not have");
        stack.push_back(*arg.default_value());
      }
    }
    {
      const c10::impl::ForceDispatchKeyGuard keys(g_default_keys->included_, g_default_keys->excluded_);
      struct Quiet final : c10::WarningHandler {
        void process(const c10::Warning&) override {}
      } quiet;  // the real call warns
      const c10::WarningUtils::WarningHandlerGuard warnings(&quiet);
      op.callBoxed(stack);
    }
    py::list out;
    for (c10::IValue& v : stack) out.append(torch::jit::toPyObject(std::move(v)));
    return out;
  }

 private:
  py::object static_value(const c10::IValue& v, size_t i) const {
    if (call_.record.args[i].is_dtype && v.isInt())
      return dtype_object(static_cast<c10::ScalarType>(v.toInt()));
    return torch::jit::toPyObject(v);
  }

  py::object operand_of(size_t i, size_t& next) const {
    while (next < call_.operands.size() && call_.operands[next].kind == Operand::kStart) ++next;
    TORCH_INTERNAL_ASSERT(next < call_.operands.size() && call_.operands[next].source == static_cast<int>(i));
    return py::make_tuple("operand", next++);
  }

  bool is_operand(const c10::IValue& v, size_t i) const {
    const ArgRecord& rec = call_.record.args[i];
    if (!v.isInt() && !v.isDouble()) return false;
    const double value = v.isInt() ? static_cast<double>(v.toInt()) : v.toDouble();
    return !rec.keyed && std::find(rec.tested.begin(), rec.tested.end(), value) == rec.tested.end();
  }

  py::object tensor_of(const at::Tensor& t, size_t i, size_t& tensor, size_t& operand) const {
    if (!t.defined()) return py::none();
    if (t.is_cpu()) return operand_of(i, operand);
    return py::make_tuple("tensor", tensor++);
  }

  py::object arg(size_t i, size_t& tensor, size_t& operand) const {
    const ArgRecord& rec = call_.record.args[i];
    const c10::IValue& v = call_.arg(i);
    if (v.isNone()) return py::none();
    if (v.isTensor()) return tensor_of(v.toTensor(), i, tensor, operand);
    if (v.isList() && rec.kind == ArgRecord::kTensorList) {
      py::list list;
      for (const c10::IValue& item : v.toListRef()) {
        list.append(item.isNone() ? py::object(py::none()) : tensor_of(item.toTensor(), i, tensor, operand));
      }
      return py::make_tuple("list", list);
    }
    if (rec.kind == ArgRecord::kScalar && is_operand(v, i)) return operand_of(i, operand);
    if (v.isList() && rec.kind == ArgRecord::kScalarList) {
      py::list list;
      for (const c10::IValue& item : static_cast<const c10::IValue&>(v).toList()) {
        list.append(is_operand(item, i) ? operand_of(i, operand)
                                        : py::make_tuple("value", static_value(item, i)));
      }
      return py::make_tuple("list", list);
    }
    return py::make_tuple("value", static_value(v, i));
  }

  py::object plan(const TensorArg& t) const {
    if (t.plan < 0) return py::none();
    const ViewPlan& p = call_.plans[static_cast<size_t>(t.plan)];
    static const char* const kinds[] = {"whole", "box", "gather"};
    py::list windows;
    for (const auto& w : p.windows) windows.append(py::make_tuple(w.size, w.step, w.sliced));
    return py::make_tuple(kinds[p.kind], std::vector<int64_t>(p.dims.begin(), p.dims.end()), windows,
                          p.covers);
  }

  const Call& call_;
};

Dims dims_of(const py::handle& h) {
  Dims dims;
  for (const py::handle& d : h) dims.push_back(d.cast<int64_t>());
  return dims;
}

c10::ScalarType scalar_type_of(const py::handle& h) {
  return reinterpret_cast<THPDtype*>(h.ptr())->scalar_type;
}

// ("output", i) | ("argument", i) | ("int", n) | ("none",) | ("list", [...]) |
// ("view", output or argument, sizes, strides, offset behind that of the argument)
ReturnSpec return_of(const py::handle& h) {
  const auto tuple = h.cast<py::tuple>();
  const auto kind = tuple[0].cast<std::string>();
  if (kind == "none") return {ReturnSpec::kUndefined};
  if (kind == "list") {
    ReturnSpec list{ReturnSpec::kList};
    for (const py::handle& item : tuple[1]) list.items.push_back(return_of(item));
    return list;
  }
  if (kind == "view") {
    ReturnSpec view{ReturnSpec::kView, tuple[4].cast<int64_t>(), {return_of(tuple[1])}};
    view.sizes = dims_of(tuple[2]);
    view.strides = dims_of(tuple[3]);
    return view;
  }
  return {kind == "output" ? ReturnSpec::kOutput
          : kind == "int"  ? ReturnSpec::kInt
                           : ReturnSpec::kArgument,
          tuple[1].cast<int64_t>(),
          {}};
}

OutputSpec output_of(const py::handle& h) {
  OutputSpec o{.dtype = scalar_type_of(h.attr("dtype")), .dims = dims_of(h.attr("dims"))};
  o.slot = h.attr("slot").cast<int>();
  o.sizes = dims_of(h.attr("sizes"));
  o.strides = dims_of(h.attr("strides"));
  o.count = h.attr("count").cast<int>();
  o.count_dim = h.attr("count_dim").cast<int>();
  return o;
}

// A torch_tpu.modes.plan.Plan.
ProgramSpec spec_of(const py::object& plan, std::string name) {
  ProgramSpec spec;
  spec.name = std::move(name);
  const auto rung = plan.attr("rung").cast<std::string>();
  spec.rung = rung == "program"     ? ProgramSpec::kProgram
              : rung == "composite" ? ProgramSpec::kComposite
                                    : ProgramSpec::kCpu;
  if (spec.rung != ProgramSpec::kProgram) return spec;
  spec.stablehlo = plan.attr("stablehlo").cast<std::string>();
  spec.serialized = plan.attr("serialized").cast<std::string>();
  spec.compile_options = plan.attr("compile_options").cast<std::string>();
  spec.store_key = plan.attr("store_key").cast<std::string>();
  spec.arg_slots = plan.attr("arg_slots").cast<std::vector<int>>();
  spec.donated = plan.attr("donated").cast<std::vector<int>>();
  spec.consumed = plan.attr("consumed").cast<std::vector<int>>();
  spec.counters = plan.attr("counters").cast<int64_t>();
  for (const py::handle& e : plan.attr("encodings"))
    spec.operands.push_back(static_cast<Encoding>(e.cast<int>()));
  for (const py::handle& o : plan.attr("outputs")) spec.outputs.push_back(output_of(o));
  for (const py::handle& r : plan.attr("returns")) spec.returns.push_back(return_of(r));
  for (const py::handle& r : plan.attr("resizes")) {
    const auto t = r.cast<py::tuple>();
    spec.resizes.push_back({t[0].cast<int>(), dims_of(t[1]), dims_of(t[2])});
  }
  return spec;
}

// What Python says of an op: rung, rng, expands_masks, check, and per argument (written, keyed, tested,
// accepts_cpu).
void apply_description(OpRecord& record, const py::object& d) {
  record.rng = d.attr("rng").cast<bool>();
  record.expands_masks = d.attr("expands_masks").cast<bool>();
  record.checks_bounds = d.attr("checks_bounds").cast<bool>();
  record.check = static_cast<ValueCheck>(d.attr("check").cast<int>());
  for (const auto& [index, written, keyed, tested, accepts_cpu] :
       d.attr("args").cast<std::vector<std::tuple<size_t, bool, bool, std::vector<double>, bool>>>()) {
    ArgRecord& arg = record.args.at(index);
    arg.written |= written;
    arg.keyed = keyed;
    arg.tested = tested;
    arg.accepts_cpu = accepts_cpu;
    record.writes |= written;
  }
  std::tie(record.functional, record.functional_overload) =
      d.attr("functional").cast<std::pair<std::string, std::string>>();
  const auto rung = d.attr("rung").cast<std::string>();
  record.state.store(rung == "program"      ? OpRecord::kProgram
                     : rung == "composite"  ? OpRecord::kComposite
                     : rung == "functional" ? OpRecord::kFunctional
                     : rung == "host"       ? OpRecord::kHost
                                            : OpRecord::kCpu,
                     std::memory_order_release);
}

py::tuple array_of(const FuseRequest::Array& a) {
  return py::make_tuple(dtype_object(a.dtype), std::vector<int64_t>(a.dims.begin(), a.dims.end()));
}

// Arguments of torch_tpu.modes.fused.fuse.
py::tuple arguments_of(const FuseRequest& r) {
  py::list texts, nodes, externals, values;
  for (const std::string* text : r.texts) texts.append(*text);
  for (const auto& node : r.nodes) nodes.append(py::make_tuple(node.text, node.wires, node.words));
  for (const auto& a : r.externals) externals.append(array_of(a));
  for (const auto& a : r.values) values.append(array_of(a));
  return py::make_tuple(texts, nodes, externals, values, r.live, r.dying);
}

void install(py::object describe, py::object lower, py::object reshape, py::object compiled, py::object fuse,
             py::object check_bounds) {
  // The functions live as long as the process; their references must not be dropped without the GIL.
  auto* const fns =
      new std::array<py::object, 6>{std::move(describe), std::move(lower), std::move(reshape),
                                    std::move(compiled), std::move(fuse),  std::move(check_bounds)};
  install_bounds_check([fns](const OpRecord& record, const torch::jit::Stack& stack) {
    with_python([&] {
      py::list values;
      for (size_t i = stack.size() - record.args.size(); i < stack.size(); ++i) {
        values.append(torch::jit::toPyObject(stack[i]));
      }
      (*fns)[5](record.name, values);
    });
  });
  install_fuse([fns](const FuseRequest& request) {
    ProgramSpec spec;
    with_python([&] { spec = spec_of((*fns)[4](*arguments_of(request)), "fused ops"); });
    return compile_spec(std::move(spec));
  });
  set_describe(
      [fns](OpRecord& record) { with_python([&] { apply_description(record, (*fns)[0](record.name)); }); });
  install_lowering(
      {.lower =
           [fns](const Call& call) {
             ProgramSpec spec;
             with_python([&] {
               const MissCall miss(call);
               spec =
                   spec_of((*fns)[1](py::cast(&miss, py::return_value_policy::reference)), call.record.name);
             });
             return spec;
           },
       .reshape =
           [fns](c10::ScalarType dtype, DimsRef from, DimsRef to) {
             ProgramSpec spec;
             with_python([&] {
               spec = spec_of((*fns)[2](dtype_object(dtype), from.vec(), to.vec()), "storage reshape");
             });
             return spec;
           },
       .compiled =
           [fns](const std::string& op, const std::string& stablehlo, const std::string& store_key,
                 const std::string& executable, const std::string& optimized, double duration_ms) {
             with_python([&] {
               (*fns)[3](op, stablehlo, store_key, py::bytes(executable), py::bytes(optimized), duration_ms);
             });
           }});
}

// A compiled graph as Python calls it: with the list of its flat inputs, which is emptied. `kinds`, a letter
// an input: t tensor, o number that is an operand, s anything that is part of the key.
class CompiledGraph {
 public:
  CompiledGraph(std::string name, const std::string& kinds, const std::vector<int>& written, bool rng,
                py::object lower)
      : record_(make_record(std::move(name), kinds, written, rng)), lower_(std::move(lower)) {}

  // `form`: the sizes of this call, for a program at bounds.
  py::list operator()(const py::list& args, const Form* form) {
    const size_t n = args.size(), numbers = form == nullptr ? 0 : form->numbers.size();
    TORCH_CHECK(n + numbers == record_.args.size(), record_.name, " takes ", record_.args.size() - numbers,
                " inputs, got ", n);
    torch::jit::Stack stack;
    stack.reserve(n + numbers);
    for (size_t i = 0; i < n; ++i) stack.push_back(value_of(PyList_GET_ITEM(args.ptr(), i)));
    PyList_SetSlice(args.ptr(), 0, static_cast<Py_ssize_t>(n), nullptr);
    std::vector<c10::IValue> originals;
    {
      const py::gil_scoped_release release;
      if (form != nullptr) originals = enter_bounds(*form, stack);
      run_graph(record_, stack, [this](const Call& call) {
        ProgramSpec spec;
        with_python([&] {
          const MissCall miss(call);
          spec = spec_of(lower_(py::cast(&miss, py::return_value_policy::reference)), record_.name);
        });
        return spec;
      });
      if (form != nullptr) leave_bounds(*form, originals, stack);
    }
    py::list out(stack.size());
    for (size_t i = 0; i < stack.size(); ++i) {
      PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i),
                      torch::jit::toPyObject(std::move(stack[i])).release().ptr());
    }
    return out;
  }

 private:
  static OpRecord& make_record(std::string name, const std::string& kinds, const std::vector<int>& written,
                               bool rng) {
    std::vector<ArgRecord> args;
    for (const char kind : kinds) {
      args.push_back({.kind = kind == 't'   ? ArgRecord::kTensor
                              : kind == 'o' ? ArgRecord::kScalar
                                            : ArgRecord::kStatic});
    }
    for (const int i : written) args.at(static_cast<size_t>(i)).written = true;
    return new_graph_record(std::move(name), std::move(args), rng);
  }

  c10::IValue value_of(PyObject* x) const {
    if (THPVariable_Check(x)) return THPVariable_Unpack(x);
    if (x == Py_None) return {};
    if (PyBool_Check(x)) return x == Py_True;
    if (PyLong_Check(x)) return static_cast<int64_t>(PyLong_AsLongLong(x));
    TORCH_CHECK_TYPE(PyFloat_Check(x), record_.name, " takes tensors and numbers, not ", Py_TYPE(x)->tp_name);
    return PyFloat_AS_DOUBLE(x);
  }

  OpRecord& record_;
  const py::object lower_;
};

}  // namespace

void without_gil(const std::function<void()>& fn) {
  if (PyGILState_Check() == 0) return fn();
  const py::gil_scoped_release release;
  fn();
}

void bind_lowering(py::module_& m) {
  g_default_keys.emplace(c10::impl::tls_local_dispatch_key_set());
  py::class_<MissCall>(m, "MissCall")
      .def_property_readonly("name", &MissCall::name)
      .def_property_readonly("state", &MissCall::state)
      .def_property_readonly("args", &MissCall::args)
      .def_property_readonly("tensors", &MissCall::tensors)
      .def_property_readonly("slots", &MissCall::slots)
      .def_property_readonly("operands", &MissCall::operands)
      .def("meta_args", [](const MissCall& c) { return translated([&] { return c.meta_args(); }); })
      .def("meta", [](const MissCall& c, const std::string& name, const std::string& overload) {
        return translated([&] { return c.meta(name, overload); });
      });
  m.def("install_lowering", &install);
  py::class_<CompiledGraph>(m, "CompiledGraph")
      .def(py::init<std::string, const std::string&, const std::vector<int>&, bool, py::object>())
      .def(
          "__call__",
          [](CompiledGraph& g, const py::list& args, const Form* form) {
            return translated([&] { return g(args, form); });
          },
          py::arg("args"), py::arg("form") = nullptr);
}

}  // namespace torch_tpu
