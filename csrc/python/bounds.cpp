#include "dispatch/bounds.h"

#include "python/lowering.h"

namespace py = pybind11;

namespace torch_tpu {

namespace {

Dims dims_of(const py::handle& h) {
  Dims dims;
  for (const py::handle& d : h) dims.push_back(d.cast<int64_t>());
  return dims;
}

// (numbers, [(input, order of dims, capacity)], a result: None as the program has it, ("int", n),
// ("argument", input), ("view", input, sizes, strides, offset), ("sized", 0, sizes, strides, offset))
Form make_form(const std::vector<int64_t>& numbers, const py::list& inputs, const py::list& results) {
  Form form;
  form.numbers = numbers;
  for (const py::handle& h : inputs) {
    const auto t = h.cast<py::tuple>();
    form.inputs.push_back({t[0].cast<size_t>(), dims_of(t[1]), t[2].cast<int64_t>()});
  }
  for (const py::handle& h : results) {
    SizedResult& r = form.results.emplace_back();
    if (h.is_none()) continue;
    const auto t = h.cast<py::tuple>();
    const auto kind = t[0].cast<std::string>();
    r.number = t[1].cast<int64_t>();
    if (kind == "sized" || kind == "view") {
      r.kind = kind == "sized" ? SizedResult::kSized : SizedResult::kView;
      r.sizes = dims_of(t[2]);
      r.strides = dims_of(t[3]);
      r.offset = t[4].cast<int64_t>();
    } else {
      r.kind = kind == "int" ? SizedResult::kInt : SizedResult::kArgument;
    }
  }
  return form;
}

}  // namespace

void bind_bounds(py::module_& m) {
  py::class_<Form>(m, "Form").def(py::init(&make_form));
  m.def("bounds_stats", [] {
    const BoundsStats s = bounds_stats();
    py::dict out;
    out["reused"] = s.reused;
    out["host_copies"] = s.host_copies;
    out["pad_programs"] = s.pad_programs;
    return out;
  });
}

}  // namespace torch_tpu
