#include "ffi/host_kernels.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/util/SmallVector.h>
#include <xla/ffi/api/c_api.h>

#include <atomic>
#include <cstring>

namespace torch_tpu {

namespace {

using Dims = c10::SmallVector<int64_t, 6>;
using DimsRef = c10::ArrayRef<int64_t>;

// ---- the call frame

c10::ScalarType scalar_type(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_F16:
      return c10::ScalarType::Half;
    case XLA_FFI_DataType_BF16:
      return c10::ScalarType::BFloat16;
    case XLA_FFI_DataType_F32:
      return c10::ScalarType::Float;
    case XLA_FFI_DataType_F64:
      return c10::ScalarType::Double;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "host kernels do not take XLA element type ",
                                  static_cast<int>(type));
  }
}

const XLA_FFI_Buffer& argument(const XLA_FFI_CallFrame& frame, int64_t i) {
  return *static_cast<const XLA_FFI_Buffer*>(frame.args.args[i]);
}

// The only attribute of these calls: a list of integers.
DimsRef integers(const XLA_FFI_CallFrame& frame) {
  TORCH_CHECK(frame.attrs.size == 1 && frame.attrs.types[0] == XLA_FFI_AttrType_ARRAY, "wrong attributes");
  const auto& array = *static_cast<const XLA_FFI_Array*>(frame.attrs.attrs[0]);
  return {static_cast<const int64_t*>(array.data), array.size};
}

at::Tensor tensor(const XLA_FFI_Buffer& buffer, DimsRef sizes, DimsRef strides) {
  return at::from_blob(buffer.data, sizes, strides, at::TensorOptions().dtype(scalar_type(buffer.dtype)));
}

at::Tensor tensor(const XLA_FFI_Buffer& buffer) {
  return at::from_blob(buffer.data, {buffer.dims, static_cast<size_t>(buffer.rank)},
                       at::TensorOptions().dtype(scalar_type(buffer.dtype)));
}

// ---- products

struct Axis {
  int64_t size = 1, stride = 1;
};

// Dims of a row-major array as one dim, if their elements are evenly spaced in this order.
std::optional<Axis> merged(const XLA_FFI_Buffer& x, DimsRef strides, DimsRef dims) {
  Axis axis;
  bool first = true;
  for (const int64_t d : dims) {
    const int64_t size = x.dims[d], stride = strides[static_cast<size_t>(d)];
    if (size == 1) continue;
    if (!first && axis.stride != stride * size) return std::nullopt;
    axis = {axis.size * size, stride};
    first = false;
  }
  return axis;
}

// `x` as (batch, rows, columns), each made of some of its dims in the order given.
at::Tensor matrices(const XLA_FFI_Buffer& x, DimsRef batch, DimsRef rows, DimsRef columns) {
  std::vector<int64_t> strides(static_cast<size_t>(x.rank), 1);
  for (auto d = static_cast<size_t>(x.rank); d-- > 1;) strides[d - 1] = strides[d] * x.dims[d];
  const auto b = merged(x, strides, batch), r = merged(x, strides, rows), c = merged(x, strides, columns);
  if (b && r && c) return tensor(x, {b->size, r->size, c->size}, {b->stride, r->stride, c->stride});
  Dims order(batch.begin(), batch.end());
  order.append(rows.begin(), rows.end());
  order.append(columns.begin(), columns.end());
  const auto numel = [&](DimsRef dims) {
    int64_t n = 1;
    for (const int64_t d : dims) n *= x.dims[d];
    return n;
  };
  return tensor(x).permute(order).reshape({numel(batch), numel(rows), numel(columns)});
}

// lhs, rhs, perhaps a bias that is added -> result, row-major of the batch dims, those of lhs, those of rhs.
// Integers: how many dims are batch, free in lhs, contracted, free in rhs; then the dims of lhs (batch, free,
// contracted), those of rhs (batch, contracted, free).
void product(const XLA_FFI_CallFrame& frame) {
  const DimsRef n = integers(frame);
  const auto batch = static_cast<size_t>(n[0]), rows = static_cast<size_t>(n[1]),
             inner = static_cast<size_t>(n[2]), columns = static_cast<size_t>(n[3]);
  const DimsRef l = n.slice(4, batch + rows + inner), r = n.slice(4 + l.size());
  const at::Tensor lhs =
      matrices(argument(frame, 0), l.slice(0, batch), l.slice(batch, rows), l.slice(batch + rows));
  const at::Tensor rhs =
      matrices(argument(frame, 1), r.slice(0, batch), r.slice(batch, inner), r.slice(batch + inner, columns));
  const auto& result = *static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[0]);
  const int64_t b = lhs.size(0), m = lhs.size(1), k = rhs.size(2);
  const bool biased = frame.args.size == 3;
  if (b == 1) {
    at::Tensor out = tensor(result, {m, k}, {k, 1});
    if (biased) {
      at::cpu::addmm_out(out, tensor(argument(frame, 2)), lhs[0], rhs[0]);
    } else {
      at::cpu::mm_out(out, lhs[0], rhs[0]);
    }
  } else {
    at::Tensor out = tensor(result, {b, m, k}, {m * k, k, 1});
    if (biased) {
      at::cpu::baddbmm_out(out, tensor(argument(frame, 2)), lhs, rhs);
    } else {
      at::cpu::bmm_out(out, lhs, rhs);
    }
  }
}

// ---- registration

std::atomic<bool> g_asked{
    false};  // the plugin asked a handler for its version, so it understood the registration

template <void (*Kernel)(const XLA_FFI_CallFrame&)>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Extension_Base* extension = frame->extension_start;
  if (extension != nullptr && extension->type == XLA_FFI_Extension_Metadata) {
    auto* const metadata = reinterpret_cast<const XLA_FFI_Metadata_Extension*>(extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    g_asked = true;
    return nullptr;
  }
  try {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Kernel(*frame);
    return nullptr;
  } catch (const std::exception& e) {
    XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, e.what(),
                                   XLA_FFI_Error_Code_INTERNAL};
    return frame->api->XLA_FFI_Error_Create(&args);
  }
}

// No package ships the header of this extension.
struct RegisterArgs {
  size_t struct_size;
  const char* target_name;
  size_t target_name_size;
  void* handler;
  const char* platform_name;
  size_t platform_name_size;
  uint32_t traits;
};

struct Extension {
  PJRT_Extension_Base base;
  void* type_id_register;
  void* user_data_add;
  PJRT_Error* (*register_handler)(RegisterArgs* args);
};

}  // namespace

bool register_host_kernels(const PJRT_Api* api) {
  const auto* extension =
      reinterpret_cast<const Extension*>(pjrt::find_extension(api, PJRT_Extension_Type_FFI));
  if (extension == nullptr || extension->base.struct_size < sizeof(Extension)) return false;
  static constexpr const char kName[] = "torch_tpu_product", kPlatform[] = "Host";
  RegisterArgs args{sizeof(RegisterArgs),
                    kName,
                    std::strlen(kName),
                    reinterpret_cast<void*>(&handler<product>),
                    kPlatform,
                    std::strlen(kPlatform),
                    0};
  if (PJRT_Error* error = extension->register_handler(&args)) {
    pjrt::take_error(api, error, "PJRT_FFI_Register_Handler");
    return false;
  }
  return g_asked;
}

}  // namespace torch_tpu
