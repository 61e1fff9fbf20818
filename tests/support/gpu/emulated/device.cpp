// A CUDA device for torch's CPU build: its memory is the host's, its kernels are those of the CPU.
//
// A tensor of the device is a real one: views, autograd, streams and collectives treat it as CUDA's. An operator that
// gets tensors of the host and of the device is refused, as on a GPU. A copy to the host that does not block arrives
// with the next synchronisation, or copy to the device; until then its target holds POISON. Counted: launches by
// operator, what the host waits for, copies between both, bytes. Hidden: streams that overlap, NCCL, graphs, the
// numerics of CUDA's kernels.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);
constexpr int POISON = 0xAB;

std::mutex lock;
std::map<std::string, int64_t> counts;
std::vector<std::pair<at::Tensor, at::Tensor>> under_way;  // target on the host, content
std::atomic<int64_t> held{0}, peak{0};

void count(const std::string& name, int64_t n = 1) {
  std::lock_guard<std::mutex> guard(lock);
  counts[name] += n;
}

void take(int64_t nbytes) {
  int64_t now = held += nbytes, most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
}

void synchronize() {
  std::vector<std::pair<at::Tensor, at::Tensor>> landing;
  {
    std::lock_guard<std::mutex> guard(lock);
    landing.swap(under_way);
  }
  for (auto& [target, content] : landing) target.copy_(content);
}

void waits(const std::string& what) {
  count("waits: " + what);
  synchronize();
}

thread_local c10::Stream current(c10::Stream::DEFAULT, DEVICE);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return current; }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    static std::atomic<int> made{0};
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, ++made);
  }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override { return std::exchange(current, next); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return synchronize(), true; }
  bool queryStream(const c10::Stream&) const override { return synchronize(), true; }
  void synchronizeEvent(void*) const override { waits("event"); }
  void synchronizeStream(const c10::Stream&) const override { waits("stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { waits("device"); }
};
c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard());

constexpr size_t HEAD = 64;  // holds the size of the block behind it

void release(void* data) {
  if (data == nullptr) return;
  void* block = static_cast<char*>(data) - HEAD;
  held -= *static_cast<int64_t*>(block);
  std::free(block);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, DEVICE};
    auto* block = static_cast<char*>(std::aligned_alloc(HEAD, (nbytes + 2 * HEAD - 1) / HEAD * HEAD));
    *reinterpret_cast<int64_t*>(block) = int64_t(nbytes);
    take(int64_t(nbytes));
    return {block + HEAD, block + HEAD, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t n) const override { default_copy_data(target, source, n); }
};
Memory memory;

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  void deviceSynchronize(c10::DeviceIndex) const override { waits("device"); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const override {
    static auto generator = at::globalContext().defaultGenerator(at::kCPU);
    return generator;
  }
};

// The same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  c10::DataPtr data(
      t.storage().mutable_data_ptr().get(), new at::Tensor(t.detach()),
      [](void* kept) { delete static_cast<at::Tensor*>(kept); }, at::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(), std::move(data), at::getCPUAllocator(), true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

at::Tensor on_device(const at::Tensor& t) {
  if (!t.defined() || t.is_cuda()) return t;
  const auto nbytes = t.storage().nbytes();
  take(int64_t(nbytes));
  c10::DataPtr data(
      t.storage().mutable_data_ptr().get(), new at::Tensor(t),
      [](void* kept) {
        auto* host = static_cast<at::Tensor*>(kept);
        held -= int64_t(host->storage().nbytes());
        delete host;
      },
      DEVICE);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, std::move(data), &memory, true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), KEYS, t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& shape) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), shape.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  return out;
}

bool starts(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

bool indexes(const std::string& name) {
  return starts(name, "aten::index.") || starts(name, "aten::index_put") || starts(name, "aten::_index_put") ||
         starts(name, "aten::_unsafe_index");
}

// Operators that a GPU gives tensors of both: indices may be on the host. Collectives check by themselves.
bool takes_both(const std::string& name) {
  return indexes(name) || starts(name, "c10d::") || name == "aten::repeat_interleave.Tensor";
}

// Operators whose result's shape is data, which the host waits for.
bool shape_is_data(const std::string& name, const std::vector<c10::IValue>& given) {
  for (auto* known : {"aten::nonzero", "aten::masked_select", "aten::bincount", "aten::_unique", "aten::unique", "aten::equal"})
    if (starts(name, known)) return true;
  if (name == "aten::repeat_interleave.Tensor") return given.back().isNone();
  if (!starts(name, "aten::_index_put")) return false;  // reading calls nonzero
  for (auto& value : given)
    if (value.isOptionalTensorList())
      for (std::optional<at::Tensor> index : value.toOptionalTensorList())
        if (index && index->defined() && index->is_cuda() && index->scalar_type() == at::kBool) return true;
  return false;
}

// Applies ``f`` to each tensor of a value.
template <class F>
void each(c10::IValue& value, const F& f) {
  if (value.isTensor()) {
    value = f(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (at::Tensor t : value.toTensorList()) made.push_back(f(t));
    value = made;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (std::optional<at::Tensor> t : value.toOptionalTensorList())
      made.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    value = made;
  } else if (value.isList() && value.toList().size() && value.toList().get(0).isTensorList()) {  // of c10d
    c10::List<c10::List<at::Tensor>> made;
    for (c10::IValue inner : value.toList()) {
      c10::List<at::Tensor> row;
      for (at::Tensor t : inner.toTensorList()) row.push_back(f(t));
      made.push_back(row);
    }
    value = made;
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto overload = schema.overload_name();
  const std::string name = schema.name() + (overload.empty() ? "" : "." + overload);
  const auto first = stack->size() - schema.arguments().size();
  const std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // on the device, on the host
  bool of_host = false;
  for (auto i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(at::kCPU);
    each(value, [&](const at::Tensor& t) {
      auto host = on_host(t);
      if (t.defined() && t.is_cuda()) pairs.push_back({t, host});
      else if (t.defined() && t.dim() > 0) of_host = true;
      return host;
    });
  }
  count(name);
  TORCH_CHECK(!of_host || pairs.empty() || takes_both(name),
              "Expected all tensors to be on the same device: ", name, " got tensors of the host and of the device");
  if (shape_is_data(name, given)) waits(name);
  op.callBoxed(*stack);
  for (auto& [device, host] : pairs) {  // an ``out`` may have another size
    if (host.sizes() == device.sizes() && host.strides() == device.strides() &&
        host.storage().data() == device.storage().data())
      continue;
    device.unsafeGetTensorImpl()->set_storage_keep_dtype(on_device(host).storage());
    device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    each((*stack)[i], [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      for (auto& [device, host] : pairs)
        if (host.is_same(t)) return device;
      for (auto& [device, host] : pairs)
        if (t.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl()) return view_of(device, t);
      return on_device(t);
    });
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, KEYS, dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, KEYS, dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool up = self.is_cuda() && !source.is_cuda(), down = !self.is_cuda() && source.is_cuda();
  count(up ? "copies to the device" : down ? "copies to the host" : "copies on the device");
  if (up) count("bytes to the device", int64_t(source.nbytes()));
  if (down) count("bytes to the host", int64_t(source.nbytes()));
  if (up && !non_blocking) waits("copy to the device");
  else if (up) synchronize();  // in the order of the stream: the source may be the target of a copy before
  auto content = on_host(source);
  if (down && non_blocking && self.is_contiguous()) {
    content = content.to(self.scalar_type(), false, true).expand_as(self).clone();
    std::memset(self.data_ptr(), POISON, self.nbytes());
    std::lock_guard<std::mutex> guard(lock);
    under_way.push_back({self, content});
    return self;
  }
  if (down) waits("copy to the host");
  on_host(self).copy_(content);
  return self;
}

at::Scalar item(const at::Tensor& t) {
  waits("item");
  return on_host(t).item();
}

void resize_storage(const at::Tensor& self, int64_t nbytes) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  auto fresh = memory.allocate(size_t(nbytes));
  if (auto kept = std::min(storage->nbytes(), size_t(nbytes))) std::memcpy(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size_t(nbytes));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto needed = (c10::multiply_integers(sizes) + self.storage_offset()) * int64_t(self.element_size());
  if (size_t(needed) > self.storage().nbytes()) resize_storage(self, needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto out = view_of(self, self);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? offset->expect_int() : self.storage_offset());
  return out;
}

at::Tensor& set_part(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                     c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  if (strides.empty() && !sizes.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage storage) {
  const auto n = int64_t(storage.nbytes() / self.element_size());
  return set_part(self, std::move(storage), 0, c10::SymIntArrayRef({c10::SymInt(n)}), {});
}

at::Tensor& set_as(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

void record_stream(at::Tensor&, at::Stream) {}

auto boxed() { return torch::CppFunction::makeFromBoxedFunction<&fallback>(); }

TORCH_LIBRARY(emulated, m) { m.def("resize_storage(Tensor self, int nbytes) -> ()"); }
TORCH_LIBRARY_IMPL(emulated, CUDA, m) { m.impl("resize_storage", &resize_storage); }
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(boxed()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_grouped_mm", boxed());  // elsewhere one product for each group, and a copy to the host
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &item);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &as_strided);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_as);
  m.impl("record_stream", &record_stream);
}
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {  // gloo, with the same memory
  for (auto* name : {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_", "allreduce_coalesced_",
                     "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
                     "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_",
                     "scatter_", "alltoall_", "alltoall_base_", "barrier"})
    m.impl(name, boxed());
}

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

extern "C" {
int64_t emulated_held() { return held; }
int64_t emulated_peak() { return peak; }
void emulated_synchronize() { waits("device"); }
// "NAME<tab>COUNT" lines; valid until the next call.
const char* emulated_counts() {
  static std::string text;
  std::lock_guard<std::mutex> guard(lock);
  text.clear();
  for (auto& [name, n] : counts) text += name + "\t" + std::to_string(n) + "\n";
  return text.c_str();
}
}
