// A device type for tests whose memory is the host's: PrivateUse1 with an allocator, a guard, hooks, generators, and a
// fallback that runs the CPU's kernel of every operator on the same memory.
//
// As on a GPU, tensors of several devices in one call raise, and memory that nobody has written is not zero: its bytes
// are 0xFF, which is NaN in every floating-point dtype. What makes the host wait for a device is counted by kind.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>

using at::Tensor;

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const int kDevices = [] {
  const char* count = std::getenv("SIMULATED_DEVICES");
  return count ? std::atoi(count) : 2;
}();
thread_local c10::DeviceIndex current = 0;

// What the host waited for: values that it read, copies to the device that are blocking or from pageable memory,
// operators whose shapes depend on values, and synchronizations.
std::atomic<int64_t> reads{0}, blocking_copies{0}, dynamic_shapes{0}, synchronizations{0};

struct Allocator final : c10::DeviceAllocator {
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const at::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {1u << 30, 1u << 30}; }
  at::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes) {
      TORCH_CHECK(!posix_memalign(&data, 64, bytes), "simulated: out of memory");
      memset(data, 0xFF, bytes);
    }
    return {data, data, &std::free, at::Device(kType, current)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

// Host memory that counts as pinned while it lives.
std::mutex pinned_lock;
std::map<const char*, size_t> pinned_ranges;
struct PinnedAllocator final : at::Allocator {
  static void release(void* data) {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_ranges.erase(static_cast<const char*>(data));
    std::free(data);
  }
  at::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes) {
      TORCH_CHECK(!posix_memalign(&data, 64, bytes), "simulated: out of pinned memory");
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned_ranges[static_cast<const char*>(data)] = bytes;
    }
    return {data, data, &release, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;
bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned_ranges.upper_bound(static_cast<const char*>(data));
  return after != pinned_ranges.begin() && data < std::prev(after)->first + std::prev(after)->second;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "simulated: invalid device ordinal ", device);
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current = device.index();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 1);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { ++synchronizations; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new double;
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<double*>(*event) = std::chrono::duration<double, std::milli>(now).count();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { ++synchronizations; }
  void synchronizeDevice(const c10::DeviceIndex) const override { ++synchronizations; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return *static_cast<double*>(end) - *static_cast<double*>(start);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(kType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return kDevices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return {kType, current}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static const std::vector<at::Generator> generators = [] {
      std::vector<at::Generator> made;
      for (int device = 0; device < kDevices; ++device) made.push_back(at::make_generator<Generator>(device));
      return made;
    }();
    return generators.at(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    if (storage.nbytes() && bytes) memcpy(data.mutable_get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};
const int hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), 0);

// A CPU tensor on the memory of a tensor of the device.
Tensor as_cpu(const Tensor& t) {
  if (!t.defined() || !t.device().is_privateuseone()) return t;
  auto options = at::TensorOptions().device(at::kCPU);
  if (!t.numel()) return at::empty(t.sizes(), options.dtype(t.dtype()));
  auto storage = t.storage();
  auto bytes = at::from_blob(
      storage.mutable_data(), {static_cast<int64_t>(storage.nbytes())}, [storage](void*) {}, options.dtype(at::kByte));
  auto view = at::empty({0}, options.dtype(t.dtype()));
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(bytes.storage());
  impl->set_storage_offset(t.storage_offset());
  impl->set_sizes_and_strides(t.sym_sizes(), t.sym_strides());
  return view;
}

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard;
  if (device && device->has_index()) guard.reset_device(*device);
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard;
  if (device && device->has_index()) guard.reset_device(*device);
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.device().is_cpu()) ++reads;
  if (from.device().is_cpu() && from.dim() > 0 && !(non_blocking && is_pinned(from.const_data_ptr()))) ++blocking_copies;
  as_cpu(to).copy_(as_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& t) {
  ++reads;
  return at::_local_scalar_dense(as_cpu(t));
}

Tensor as_strided(const Tensor& t, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
void record_stream(Tensor&, c10::Stream) {}
int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // composed of products
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t first = stack->size() - schema.arguments().size();
  std::optional<at::Device> device;
  std::vector<std::pair<Tensor, Tensor>> pairs;
  std::vector<std::pair<at::Generator, at::Generator>> generators;
  bool on_host = false;

  auto to_cpu = [&](const Tensor& t, bool is_index = false) {
    if (!t.defined()) return t;
    if (!t.device().is_privateuseone()) {
      on_host |= t.dim() > 0 && !is_index;  // scalars and indices may be on the host
      return t;
    }
    TORCH_CHECK(!device || *device == t.device(), "Expected all tensors to be on the same device, but got ", *device,
                " and ", t.device(), " in ", name);
    device = t.device();
    pairs.emplace_back(t, as_cpu(t));
    return pairs.back().second;
  };
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = to_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (Tensor t : value.toTensorList()) list.push_back(to_cpu(t));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : value.toOptionalTensorList())
        list.push_back(t ? std::optional<Tensor>(to_cpu(*t, true)) : t);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      device = value.toDevice();
      value = at::Device(at::kCPU);
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().is_privateuseone(), "Expected a 'simulated' device type for generator but found ",
                  generator.device(), " in ", name);
      auto copy = at::make_generator<at::CPUGeneratorImpl>(generator.current_seed());
      copy.set_state(generator.get_state());
      generators.emplace_back(generator, copy);
      value = copy;
    }
  }
  TORCH_CHECK(!(device && on_host), "Expected all tensors to be on the same device, but got ", *device, " and cpu in ",
              name);
  if (name == "aten::nonzero" || name == "aten::masked_select" || name.rfind("aten::_unique", 0) == 0) ++dynamic_shapes;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [generator, copy] : generators) generator.set_state(copy.get_state());

  auto from_cpu = [&](const Tensor& t) -> Tensor {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& [own, copy] : pairs) {
      if (copy.unsafeGetTensorImpl() != t.unsafeGetTensorImpl()) continue;
      if (!own.sizes().equals(t.sizes()) || !own.numel()) {  // out= was resized
        at::native::resize_(own, t.sizes(), std::nullopt);
        as_cpu(own).copy_(t);
      }
      return own;
    }
    for (auto& [own, copy] : pairs)
      if (t.storage().data() && copy.storage().data() == t.storage().data())  // a view
        return at::native::as_strided_tensorimpl(own, t.sizes(), t.strides(), t.storage_offset());
    c10::DeviceGuard guard(device.value_or(at::Device(kType, current)));
    Tensor own = at::detail::empty_strided_generic(t.sizes(), t.strides(), &allocator, kKeys, t.scalar_type());
    as_cpu(own).copy_(t);
    return own;
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = from_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (Tensor t : value.toTensorList()) list.push_back(from_cpu(t));
      value = list;
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &as_strided);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Autocast, for the operators that CUDA has it for and models here use.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(rms_norm, fp32)
}

TORCH_LIBRARY(simulated, m) {
  m.def("as_cpu(Tensor t) -> Tensor", [](const Tensor& t) { return as_cpu(t); });
  m.def("set_device(int index) -> ()", [](int64_t index) { Guard().setDevice(c10::Device(kType, index)); });
  m.def("current_device() -> int", []() -> int64_t { return current; });
  m.def("device_count() -> int", []() -> int64_t { return kDevices; });
  m.def("waits() -> int[]", []() { return std::vector<int64_t>{reads, blocking_copies, dynamic_shapes, synchronizations}; });
  m.def("manual_seed(int seed) -> ()", [](int64_t seed) {
    for (int device = 0; device < kDevices; ++device) {
      auto generator = Hooks().getDefaultGenerator(device);
      generator.set_current_seed(seed);
    }
  });
}
