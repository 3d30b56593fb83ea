#include "dispatch/rebase.h"

#include <algorithm>
#include <numeric>

#include "cache/executable_cache.h"
#include "dispatch/launch.h"
#include "dispatch/lower.h"
#include "storage/transfer.h"
#include "trace/deferred.h"

namespace torch_tpu {

namespace {

constexpr int64_t kRebaseTag = -1;  // no OpRecord has this address

// Sizes in the order of their strides, if the tensor's elements are dense in memory.
std::optional<Dims> dense_dims(const at::Tensor& t) {
  if (!t.is_non_overlapping_and_dense()) return std::nullopt;
  c10::SmallVector<int64_t, 6> order(static_cast<size_t>(t.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return t.size(a) != 1 && t.size(b) != 1 && t.stride(a) > t.stride(b);
  });
  Dims dims;
  for (const int64_t d : order) dims.push_back(t.size(d));
  return dims;
}

bool covers_storage(const at::Tensor& t, int64_t bytes) {
  return t.storage_offset() == 0 && static_cast<int64_t>(t.nbytes()) == bytes;
}

}  // namespace

void set_unwritten_form(Slot& slot, const at::Tensor& t) {
  const auto bytes = static_cast<int64_t>(t.storage().nbytes());
  slot.dtype = t.scalar_type();
  std::optional<Dims> dims = covers_storage(t, bytes) ? dense_dims(t) : std::nullopt;
  slot.dims = dims ? std::move(*dims) : Dims{bytes / static_cast<int64_t>(t.itemsize())};
}

void adopt_dtype(Slot& slot, const at::Tensor& t) {
  const bool raw = slot.buffer != nullptr && slot.dtype == c10::ScalarType::Byte && slot.dims.size() == 1;
  if (!raw || t.scalar_type() == c10::ScalarType::Byte || !covers_storage(t, slot.buffer->bytes)) return;
  const std::optional<Dims> dims = dense_dims(t);
  if (!dims) return;
  BufferRef typed = retyped(slot.buffer, t.scalar_type(), *dims);
  if (!slot.storage->reserve(slot.buffer)) return;  // another thread wrote meanwhile: the call runs again
  slot.buffer = std::move(typed);
  slot.dtype = t.scalar_type();
  slot.dims = *dims;
  slot.storage->set_buffer(slot.buffer);
}

void rebase(Slot& slot, DimsRef dims, bool deferred) {
  const std::vector<int64_t> target = dims.vec();  // `dims` may lie in the slot
  if (slot.buffer == nullptr || slot.buffer->failed()) {
    if (slot.buffer == nullptr) slot.dims.assign(target.begin(), target.end());
    return;
  }
  ProgramKey key;
  key.words.append({kRebaseTag, static_cast<int64_t>(slot.dtype), static_cast<int64_t>(slot.dims.size())});
  key.words.append(slot.dims.begin(), slot.dims.end());
  key.words.append(target.begin(), target.end());
  key.words.push_back(deferred);
  const ProgramRef program = ExecutableCache::get().find_or_make(key, key.hash(), [&] {
    ProgramSpec spec = lower_reshape(slot.dtype, slot.dims, target);
    return deferred ? keep_spec(std::move(spec)) : compile_spec(std::move(spec));
  });
  if (!slot.storage->reserve(slot.buffer)) {  // another thread wrote meanwhile
    const BufferRef now = slot.storage->buffer();
    slot = {slot.storage, now, now->dtype, now->dims};
    return;
  }
  if (deferred) {
    DeviceBuffer* const source = slot.buffer.get();
    slot.buffer = record_launch(slot.storage->device, program, source, {}, "storage reshape")[0];
  } else {
    const bool donate = slot.buffer.use_count() == 1;
    slot.buffer = launch_reshape(*program, std::move(slot.buffer), target, donate);
  }
  slot.dims.assign(target.begin(), target.end());
  slot.storage->set_buffer(slot.buffer);
}

}  // namespace torch_tpu
