#include "dispatch/op_record.h"

#include <map>
#include <mutex>

namespace torch_tpu {

namespace {

DescribeFn g_describe;
std::mutex g_describe_mutex;  // taken without the GIL; `g_describe` takes the GIL under it

ArgRecord::Kind kind_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      return kind_of(*type.expectRef<c10::OptionalType>().getElementType());
    case c10::TypeKind::TensorType:
      return ArgRecord::kTensor;
    case c10::TypeKind::NumberType:
    case c10::TypeKind::FloatType:
      return ArgRecord::kScalar;
    case c10::TypeKind::GeneratorType:
      return ArgRecord::kGenerator;
    case c10::TypeKind::ListType: {
      const auto inner = kind_of(*type.expectRef<c10::ListType>().getElementType());
      if (inner == ArgRecord::kTensor) return ArgRecord::kTensorList;
      return inner == ArgRecord::kScalar ? ArgRecord::kScalarList : ArgRecord::kStatic;
    }
    default:
      return ArgRecord::kStatic;
  }
}

bool is_dtype(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::OptionalType) {
    return is_dtype(*type.expectRef<c10::OptionalType>().getElementType());
  }
  return type.kind() == c10::TypeKind::ScalarTypeType;
}

}  // namespace

OpRecord::OpRecord(c10::OperatorHandle handle) : op(std::move(handle)) {
  const c10::FunctionSchema& schema = op->schema();
  name = schema.name();
  name.replace(name.find("::"), 2, ".");
  name += "." + (schema.overload_name().empty() ? "default" : schema.overload_name());
  fills_minlength = name.rfind("aten.bincount.", 0) == 0;
  fills_output_size = name == "aten.repeat_interleave.Tensor";
  is_foreach = name.rfind("aten._foreach_", 0) == 0;
  fills = name.rfind("aten.fill", 0) == 0 || name.rfind("aten.zero", 0) == 0;
  for (const c10::Argument& arg : schema.arguments()) {
    ArgRecord record{.kind = kind_of(*arg.type())};
    record.written = arg.alias_info() != nullptr && arg.alias_info()->isWrite();
    record.is_dtype = is_dtype(*arg.real_type());
    writes |= record.written;
    args.push_back(std::move(record));
  }
}

OpRecord::OpRecord(std::string name, std::vector<ArgRecord> args, bool rng)
    : name(std::move(name)), args(std::move(args)), state(kProgram), rng(rng) {
  for (const ArgRecord& arg : this->args) writes |= arg.written;
}

void set_describe(DescribeFn describe) { g_describe = std::move(describe); }

void describe_once(OpRecord& record) {
  Runtime::without_gil([&] {
    std::lock_guard lock(g_describe_mutex);
    if (record.state.load(std::memory_order_acquire) == OpRecord::kUnknown) g_describe(record);
  });
}

OpRecord& record_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;  // guards `records`
  static auto* records = new std::map<std::string, std::unique_ptr<OpRecord>>;
  const std::string key = c10::toString(op.operator_name());
  std::lock_guard lock(mutex);
  auto& record = (*records)[key];
  if (record == nullptr) record = std::make_unique<OpRecord>(op);
  return *record;
}

OpRecord& new_graph_record(std::string name, std::vector<ArgRecord> args, bool rng) {
  return *new OpRecord(std::move(name), std::move(args), rng);
}

}  // namespace torch_tpu
