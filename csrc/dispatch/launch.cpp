#include "dispatch/launch.h"

#include <ATen/Context.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided.h>

#include <bit>
#include <cstring>

#include "dispatch/operands.h"
#include "dispatch/rebase.h"
#include "storage/transfer.h"
#include "trace/deferred.h"
#include "util/check.h"

namespace torch_tpu {

namespace {

using Outputs = c10::SmallVector<BufferRef, 4>;

void resize_outputs(const Call& call, const ProgramSpec& spec) {
  for (const ResizeSpec& r : spec.resizes) {
    const at::Tensor& t = *call.tensors[static_cast<size_t>(r.tensor)].tensor;
    at::native::resize_output(t, r.sizes);
    if (t.strides() != DimsRef(r.strides)) t.unsafeGetTensorImpl()->set_sizes_and_strides(r.sizes, r.strides);
  }
}

// Everything a launch takes from the storages; gives it back unless the launch happened. Storages that are
// read and written are reserved, shared or not: between the read and the write no other thread may write.
class Arguments {
 public:
  Arguments(Call& call, const ProgramSpec& spec) : call_(call), spec_(spec) {}
  ~Arguments() {
    for (Slot* slot : reserved_) slot->storage->set_buffer(std::move(slot->buffer));
  }

  // False: a storage changed meanwhile, or another launch has reserved it. Never waits, so two launches that
  // reserve several storages cannot wait for each other.
  bool collect() {
    for (const int n : spec_.arg_slots) {
      Slot& slot = slot_at(n);
      if (slot.buffer == nullptr) {
        slot.buffer = slot.storage->buffer_or_zeros(slot.dtype, slot.dims);
        if (slot.buffer->dtype != slot.dtype || slot.buffer->dims != slot.dims) return false;
      }
      if (!call_.deferred && slot.buffer->failure() != nullptr) failure = slot.buffer->failure();
      buffers.push_back(slot.buffer.get());
    }
    for (const int i : spec_.donated) {
      Slot& slot = slot_at(spec_.arg_slots[static_cast<size_t>(i)]);
      if (!slot.storage->reserve(slot.buffer)) return false;
      reserved_.push_back(&slot);
      if (slot.buffer.use_count() != 1) keep.push_back(i);
    }
    return true;
  }

  // The launch happened: what was donated is its results' memory now and must not be counted twice.
  void launched() {
    for (Slot* slot : reserved_) slot->buffer.reset();
  }
  // The storages have their new buffers.
  void consumed() { reserved_.clear(); }
  // The launch failed after donation: what was in the storages is lost.
  void poison(const FailurePtr& why) {
    for (Slot* slot : reserved_) {
      if (slot->buffer.use_count() != 1) continue;
      slot->buffer = c10::make_intrusive<DeviceBuffer>(*call_.device, why, slot->dtype, slot->dims);
    }
  }

  c10::SmallVector<DeviceBuffer*, 8> buffers;
  c10::SmallVector<int64_t, 4> keep;  // reserved, but others hold the buffer: not donated
  FailurePtr failure;

 private:
  Slot& slot_at(int n) { return call_.slots[static_cast<size_t>(n)]; }

  Call& call_;
  const ProgramSpec& spec_;
  c10::SmallVector<Slot*, 2> reserved_;
};

// What a consumed storage holds from now on.
const FailurePtr& consumed_failure() {
  static const auto* failure = new FailurePtr(std::make_shared<Failure>(
      Failure{PJRT_Error_Code_FAILED_PRECONDITION,
              "a compiled backward reused the memory of this activation, so it cannot run twice; set "
              "torch._functorch.config.donated_buffer = False to keep activations."}));
  return *failure;
}

Outputs failed_outputs(const Call& call, const ProgramSpec& spec, const FailurePtr& failure) {
  Outputs outs;
  for (const OutputSpec& o : spec.outputs) {
    outs.push_back(c10::make_intrusive<DeviceBuffer>(*call.device, failure, o.dtype, o.dims));
  }
  return outs;
}

Outputs run(Call& call, const Program& program, Arguments& args) {
  const ProgramSpec& spec = program.spec;
  if (args.failure != nullptr) return failed_outputs(call, spec, args.failure);
  DeviceState& device = *call.device;
  c10::SmallVector<PJRT_Buffer*, 8> handles;
  for (DeviceBuffer* buffer : args.buffers) handles.push_back(buffer->handle());
  BufferRef pack;
  if (program.operand_words != 0) {
    pack = packed_operands(call, program);
    handles.push_back(pack->handle());
  }
  c10::SmallVector<PJRT_Buffer*, 8> raw(spec.outputs.size());
  try {
    device.launch(*program.executable,
                  {.device = device.device.handle,
                   .args = handles.data(),
                   .num_args = handles.size(),
                   .outs = raw.data(),
                   .keep = args.keep.data(),
                   .num_keep = args.keep.size()},
                  spec.donated.size(), call.record.name.c_str());
  } catch (const pjrt::Error& e) {
    auto failure =
        std::make_shared<Failure>(Failure{e.code, c10::str("[", call.record.name, "] ", e.what())});
    if (e.code == PJRT_Error_Code_RESOURCE_EXHAUSTED) {
      args.poison(failure);
      throw_failure(*failure);
    }
    device.work.fail(failure);
    return failed_outputs(call, spec, failure);
  }
  args.launched();
  const PJRT_Api* api = Runtime::get().client().api();
  Outputs outs;
  for (size_t i = 0; i < raw.size(); ++i) {
    const OutputSpec& o = spec.outputs[i];
    TORCH_INTERNAL_ASSERT(raw[i] != nullptr, call.record.name,
                          ": the program has fewer results than its plan");
    outs.push_back(c10::make_intrusive<DeviceBuffer>(device, pjrt::Buffer(api, raw[i]), o.dtype, o.dims,
                                                     call.record.name.c_str()));
  }
  return outs;
}

Outputs record(Call& call, const ProgramRef& program, Arguments& args) {
  const OperandWords words =
      program->operand_words != 0 ? operand_words(call, program->spec) : OperandWords();
  Outputs outs = record_launch(*call.device, program, args.buffers, words, call.record.name.c_str());
  args.launched();
  return outs;
}

// A result whose true size came out of the program: exact where the host can copy it, else a prefix of the
// buffer.
at::Tensor dynamic_tensor(const OutputSpec& o, const BufferRef& buffer, const BufferRef& count) {
  int64_t n = 0;
  buffer_to_host(*count, &n);
  Dims sizes = o.sizes;
  sizes[static_cast<size_t>(o.count_dim)] = n;
  if (const void* data = o.count_dim == 0 ? host_pointer(*buffer) : nullptr) {
    BufferRef exact = buffer_from_host(buffer->device, data, o.dtype, sizes);
    const auto strides = c10::contiguous_strides(sizes);
    return make_tensor(std::move(exact), o.dtype, sizes, strides);
  }
  return make_tensor(buffer, o.dtype, sizes, c10::contiguous_strides(o.dims));
}

// The results, in the order of the plan. Two that share an output share its storage.
class Results {
 public:
  Results(const Call& call, const ProgramSpec& spec, const Outputs& outs)
      : call_(call), spec_(spec), outs_(outs), made_(outs.size()) {}
  c10::IValue get(const ReturnSpec& r);

 private:
  at::Tensor output(size_t i);
  at::Tensor view(const ReturnSpec& r);

  const Call& call_;
  const ProgramSpec& spec_;
  const Outputs& outs_;
  c10::SmallVector<at::Tensor, 4> made_;
};

at::Tensor Results::output(size_t i) {
  at::Tensor& t = made_[i];
  if (t.defined()) return t;
  const OutputSpec& o = spec_.outputs[i];
  t = o.count >= 0 ? dynamic_tensor(o, outs_[i], outs_[static_cast<size_t>(o.count)])
                   : make_tensor(outs_[i], o.dtype, o.sizes, o.strides);
  return t;
}

at::Tensor Results::view(const ReturnSpec& r) {
  const at::Tensor base = get(r.items[0]).toTensor();
  at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(base.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), base.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(r.sizes, r.strides, base.storage_offset() + r.index);
  return t;
}

c10::IValue Results::get(const ReturnSpec& r) {
  switch (r.kind) {
    case ReturnSpec::kOutput:
      return output(static_cast<size_t>(r.index));
    case ReturnSpec::kView:
      return view(r);
    case ReturnSpec::kArgument:
      return call_.arg(static_cast<size_t>(r.index));
    case ReturnSpec::kUndefined:
      return at::Tensor();
    case ReturnSpec::kInt:
      return r.index;
    case ReturnSpec::kList: {
      c10::List<at::Tensor> list;
      list.reserve(r.items.size());
      for (const ReturnSpec& item : r.items) list.push_back(get(item).toTensor());
      return list;
    }
  }
  return {};
}

}  // namespace

at::Tensor make_tensor(BufferRef buffer, c10::ScalarType dtype, DimsRef sizes, DimsRef strides) {
  const size_t bytes = static_cast<size_t>(numel_of(buffer->dims)) * c10::elementSize(buffer->dtype);
  c10::DataPtr ptr = Storage::allocate(buffer->device, bytes);
  static_cast<Storage*>(ptr.get_context())->set_buffer(std::move(buffer));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(ptr),
                       c10::GetAllocator(c10::DeviceType::PrivateUse1), /*resizable=*/true);
  at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                          c10::scalarTypeToTypeMeta(dtype));
  if (sizes.size() != 1 || sizes[0] != 0) t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return t;
}

bool launch(Call& call, const ProgramRef& program) {
  const ProgramSpec& spec = program->spec;
  Outputs outs;
  {
    resize_outputs(call, spec);  // first: it asks the storages for buffers that collect() may take out
    Arguments args(call, spec);
    if (!args.collect()) return false;
    if (!spec.outputs.empty()) outs = call.deferred ? record(call, program, args) : run(call, *program, args);
    for (size_t i = 0; i < outs.size(); ++i) {
      const int slot = spec.outputs[i].slot;
      if (slot >= 0) call.slots[static_cast<size_t>(slot)].storage->set_buffer(outs[i]);
    }
    for (const int i : spec.consumed) {
      Slot& slot = call.slots[static_cast<size_t>(spec.arg_slots[static_cast<size_t>(i)])];
      slot.storage->set_buffer(
          c10::make_intrusive<DeviceBuffer>(*call.device, consumed_failure(), slot.dtype, slot.dims));
    }
    if (!outs.empty()) args.consumed();  // failed ones too: each reserved storage has its output
  }
  c10::SmallVector<c10::IValue, 4> results;
  Results made(call, spec, outs);
  for (const ReturnSpec& r : spec.returns) results.push_back(made.get(r));
  torch::jit::drop(call.stack, call.record.args.size());
  for (c10::IValue& v : results) call.stack.push_back(std::move(v));
  if (call.mode == EagerMode::kDebug) Runtime::without_gil([&] { call.device->work.synchronize(); });
  if (call.deferred) {
    call.slots.clear();  // what only this call holds is dead
    flush_if_full(*call.device);
  }
  return true;
}

BufferRef launch_reshape(const Program& program, BufferRef source, DimsRef dims, bool donate) {
  DeviceState& device = source->device;
  const c10::ScalarType dtype = source->dtype;
  PJRT_Buffer* arg = source->handle();
  PJRT_Buffer* out = nullptr;
  const int64_t keep[1] = {0};
  try {
    device.launch(*program.executable,
                  {.device = device.device.handle,
                   .args = &arg,
                   .num_args = 1,
                   .outs = &out,
                   .keep = keep,
                   .num_keep = !donate},
                  1, "storage reshape");
  } catch (const pjrt::Error& e) {
    const auto failure = std::make_shared<Failure>(Failure{e.code, c10::str("[storage reshape] ", e.what())});
    device.work.fail(failure);
    return c10::make_intrusive<DeviceBuffer>(device, failure, dtype, dims);
  }
  source.reset();  // donated memory is not counted twice
  return c10::make_intrusive<DeviceBuffer>(device, pjrt::Buffer(Runtime::get().client().api(), out), dtype,
                                           dims);
}

}  // namespace torch_tpu
