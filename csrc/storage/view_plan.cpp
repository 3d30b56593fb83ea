#include "storage/view_plan.h"

#include <algorithm>

#include "util/check.h"

namespace torch_tpu {

namespace {

struct Run {
  int64_t stride, size;
};

// Dims that matter for where elements lie: more than one element, not broadcast.
c10::SmallVector<Run, 6> runs_of(DimsRef sizes, DimsRef strides) {
  c10::SmallVector<Run, 6> runs;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides[i] != 0) runs.push_back({strides[i], sizes[i]});
  }
  return runs;
}

bool is_whole(DimsRef base, DimsRef sizes, DimsRef strides, int64_t offset) {
  if (offset != 0 || base != sizes) return false;
  int64_t want = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1 && strides[i] != want) return false;
    want *= sizes[i];
  }
  return true;
}

void finish_box(ViewPlan& plan) {
  plan.kind = ViewPlan::kBox;
  plan.covers =
      std::none_of(plan.windows.begin(), plan.windows.end(), [](const auto& w) { return w.sliced; });
}

// The box in the buffer's own dims: each run lies along one of them.
bool plan_own_dims(ViewPlan& plan, DimsRef base, const c10::SmallVector<Run, 6>& runs, int64_t offset) {
  plan.dims.assign(base.begin(), base.end());
  plan.windows.clear();
  Dims base_strides(base.size());
  int64_t stride = 1;
  for (size_t i = base.size(); i-- > 0;) {
    base_strides[i] = stride;
    stride *= base[i];
  }
  for (size_t i = 0; i < base.size(); ++i) {
    const int64_t start = i == 0 ? offset / base_strides[i] : offset / base_strides[i] % base[i];
    if (start >= base[i]) return false;
    plan.windows.push_back({start, 1, 1, base[i] != 1});
  }
  c10::SmallVector<bool, 6> used(base.size(), false);
  for (const Run& run : runs) {
    size_t i = 0;  // the dim of more than one element with the largest stride not above the run's
    while (i < base.size() && (base_strides[i] > run.stride || base[i] == 1)) ++i;
    if (i == base.size() || used[i] || run.stride % base_strides[i] != 0) return false;
    auto& w = plan.windows[i];
    w.step = run.stride / base_strides[i];
    w.size = run.size;
    if (w.start + (w.size - 1) * w.step >= base[i]) return false;
    w.sliced = w.size != base[i];
    used[i] = true;
  }
  finish_box(plan);
  return true;
}

// The box in dims made of the view's own strides: for views that split or merge dims of the buffer.
bool plan_view_dims(ViewPlan& plan, int64_t numel, c10::SmallVector<Run, 6> runs, int64_t offset) {
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.stride > b.stride; });
  c10::SmallVector<Run, 6> merged;
  for (const Run& run : runs) {
    if (!merged.empty() && merged.back().stride == run.size * run.stride) {
      merged.back() = {run.stride, merged.back().size * run.size};
    } else {
      merged.push_back(run);
    }
  }
  if (merged.empty() || merged.back().stride != 1) merged.push_back({1, 1});
  plan.dims.clear();
  plan.windows.clear();
  int64_t outer = numel, rest = offset;
  for (const Run& run : merged) {
    if (run.stride == 0 || outer % run.stride != 0) return false;
    const int64_t dim = outer / run.stride, start = rest / run.stride;
    if (start + run.size > dim) return false;
    plan.dims.push_back(dim);
    plan.windows.push_back({start, run.size, 1, run.size != dim});
    rest %= run.stride;
    outer = run.stride;
  }
  finish_box(plan);
  return true;
}

}  // namespace

Dims dims_as(DimsRef dims, c10::ScalarType from, c10::ScalarType to) {
  Dims out(dims.begin(), dims.end());
  const auto a = static_cast<int64_t>(c10::elementSize(from)), b = static_cast<int64_t>(c10::elementSize(to));
  if (a == b) return out;
  if (a > b) {
    out.push_back(a / b);
    return out;
  }
  const int64_t ratio = b / a;
  if (out.empty() ||
      out.back() % ratio != 0) {  // whole elements of the flat buffer; a rest of bytes is unreadable
    out.assign({numel_of(dims) / ratio});
    return out;
  }
  out.back() /= ratio;
  if (out.back() == 1) out.pop_back();
  return out;
}

ViewPlan plan_view(DimsRef base, DimsRef sizes, DimsRef strides, int64_t offset) {
  ViewPlan plan;
  if (is_whole(base, sizes, strides, offset)) {
    plan.dims.assign(base.begin(), base.end());
    plan.covers = true;
    return plan;
  }
  const int64_t numel = numel_of(base);
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) {  // nothing is read: any buffer will do
      plan.kind = ViewPlan::kGather;
      plan.dims.assign({numel});
      return plan;
    }
    last += (sizes[i] - 1) * strides[i];
  }
  TORCH_TPU_CHECK(E204, last < numel, "a view of sizes ", sizes, ", strides ", strides, " and offset ",
                  offset, " reaches element ", last, " of a storage with ", numel, " elements.",
                  Fix("check the as_strided call, or write to the storage after resizing it."));
  const auto runs = runs_of(sizes, strides);
  if (plan_own_dims(plan, base, runs, offset) || plan_view_dims(plan, numel, runs, offset)) return plan;
  plan.kind = ViewPlan::kGather;
  plan.dims.assign({numel});
  plan.windows.clear();
  plan.offset = offset;
  return plan;
}

}  // namespace torch_tpu
