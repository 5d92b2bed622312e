// A simulated accelerator, for tests: torch's private device, of which a process has two.
//
//   memory      of its own: what a tensor's address names, the host may not touch. The same pages are mapped a second
//               time, for the device itself. Who reads an address on the host faults, and the fault is told by name.
//   streams     run on threads of their own, and late: what is queued there is done when somebody waits for it, or
//               after a while. So whoever forgets to wait finds what was there before.
//   operators   are the host's: arguments are copied there, and results are copied back late, on the current stream.
//   allocator   keeps what is freed for the stream that it was made for, and for others once that stream is done.
//
// Invariants: no thread of a stream takes Python's lock. Streams, events' streams and memory live to the end.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

using c10::Device;
using c10::DeviceIndex;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex NUM_DEVICES = 2;
constexpr size_t ARENA_BYTES = size_t(1) << 30, ROUND_BYTES = 512;
using Clock = std::chrono::steady_clock;
std::chrono::milliseconds late{200};  // how long a stream waits for somebody who wants what it has to do

thread_local DeviceIndex current_device = 0;

// ---- streams

class Queue {  // a stream's: what it has to do, in order, on its own thread
 public:
  Queue() : thread_([this] { run(); }) { thread_.detach(); }

  uint64_t put(std::function<void()> task) {
    std::lock_guard<std::mutex> hold(mutex_);
    tasks_.push_back({std::move(task), Clock::now() + late});
    changed_.notify_all();
    return ++num_put_;
  }

  uint64_t num_put() {
    std::lock_guard<std::mutex> hold(mutex_);
    return num_put_;
  }

  bool is_done(uint64_t number) {
    std::lock_guard<std::mutex> hold(mutex_);
    return num_done_ >= number;
  }

  void wait(uint64_t number) {
    std::unique_lock<std::mutex> hold(mutex_);
    wanted_ = std::max(wanted_, number);
    changed_.notify_all();
    changed_.wait(hold, [&] { return num_done_ >= number; });
  }

 private:
  struct Task {
    std::function<void()> run;
    Clock::time_point due;
  };

  void run() {
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      changed_.wait(hold, [&] { return !tasks_.empty(); });
      changed_.wait_until(hold, tasks_.front().due, [&] { return wanted_ > num_done_; });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      hold.unlock();
      task.run();
      task.run = nullptr;
      hold.lock();
      ++num_done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t num_put_ = 0, num_done_ = 0, wanted_ = 0;
  std::thread thread_;
};

std::mutex streams_mutex;
std::deque<Queue*>& queues_of(DeviceIndex device) {  // by number of stream; the default one is 0
  static auto* all = new std::deque<Queue*>[NUM_DEVICES];
  if (all[device].empty()) all[device].push_back(new Queue);
  return all[device];
}

Queue& queue_of(const c10::Stream& stream) {
  std::lock_guard<std::mutex> hold(streams_mutex);
  return *queues_of(stream.device_index()).at(stream.id());
}

c10::Stream stream_of(DeviceIndex device, int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, Device(KIND, device), number);
}

int64_t& current_number(DeviceIndex device) {
  thread_local int64_t numbers[NUM_DEVICES] = {};
  return numbers[device];
}

c10::Stream current_stream(DeviceIndex device) {
  return stream_of(device, current_number(device));
}

void synchronize(const c10::Stream& stream) {
  auto& queue = queue_of(stream);
  queue.wait(queue.num_put());
}

void synchronize(DeviceIndex device) {
  std::deque<Queue*> all;
  {
    std::lock_guard<std::mutex> hold(streams_mutex);
    all = queues_of(device);
  }
  for (auto* queue : all) queue->wait(queue->num_put());
}

struct Event {
  Queue* queue = nullptr;
  uint64_t number = 0;
};

// ---- memory

struct Arena {  // one device's: `device` is what addresses name, `inside` are the same pages for the device itself
  char *device = nullptr, *inside = nullptr;
  size_t used = 0;
};

Arena& arena_of(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new Arena[NUM_DEVICES];
    for (auto* one = made; one != made + NUM_DEVICES; ++one) {
      const int file = memfd_create("simulated accelerator", 0);
      TORCH_CHECK(file >= 0 && ftruncate(file, ARENA_BYTES) == 0, "no memory for a simulated accelerator");
      one->device = (char*)mmap(nullptr, ARENA_BYTES, PROT_NONE, MAP_SHARED, file, 0);
      one->inside = (char*)mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      TORCH_CHECK(one->device != MAP_FAILED && one->inside != MAP_FAILED, "no addresses for one");
      close(file);
    }
    return made;
  }();
  return all[index];
}

DeviceIndex device_of_address(const void* address) {  // -1: the host's
  for (DeviceIndex index = 0; index < NUM_DEVICES; ++index) {
    const auto offset = (const char*)address - arena_of(index).device;
    if (offset >= 0 && offset < (ptrdiff_t)ARENA_BYTES) return index;
  }
  return -1;
}

char* inside(const void* address) {
  auto& arena = arena_of(device_of_address(address));
  return arena.inside + ((const char*)address - arena.device);
}

struct Block {
  size_t num_bytes;
  c10::Stream stream;              // that it was made for
  std::vector<Event> used_on = {};  // others that must be done with it before it is given again
};

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const auto device = current_device;
    void* address = num_bytes == 0 ? nullptr : take(device, (num_bytes + ROUND_BYTES - 1) / ROUND_BYTES * ROUND_BYTES);
    return {address, address, &give_back, Device(KIND, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    synchronize(device_of_address(from));
    synchronize(device_of_address(to));
    std::memcpy(inside(to), inside(from), num_bytes);
  }

  void* take(DeviceIndex device, size_t num_bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    const auto stream = current_stream(device);
    auto& free = free_[{device, stream.id(), num_bytes}];
    for (auto one = free.begin(); one != free.end(); ++one) {
      auto& used_on = blocks_.at(*one).used_on;
      if (!std::all_of(used_on.begin(), used_on.end(), [](auto& e) { return e.queue->is_done(e.number); })) continue;
      used_on.clear();
      void* address = *one;
      free.erase(one);
      return address;
    }
    auto& arena = arena_of(device);
    TORCH_CHECK(arena.used + num_bytes <= ARENA_BYTES, "simulated accelerator: out of memory on device ", int(device));
    void* address = arena.device + arena.used;
    arena.used += num_bytes;
    blocks_.emplace(address, Block{num_bytes, stream});
    return address;
  }

  static void give_back(void* address);

  void put_back(void* address) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto& block = blocks_.at(address);
    free_[{block.stream.device_index(), block.stream.id(), block.num_bytes}].push_back(address);
  }

  void used_on(void* address, const c10::Stream& stream) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = blocks_.find(address);
    if (found == blocks_.end() || found->second.stream == stream) return;
    auto& queue = queue_of(stream);
    found->second.used_on.push_back({&queue, queue.num_put()});
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::map<std::tuple<DeviceIndex, int64_t, size_t>, std::deque<void*>> free_;
};

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory;
  return *memory;
}

void DeviceMemory::give_back(void* address) {
  if (address != nullptr) device_memory().put_back(address);
}

std::mutex pinned_mutex;
std::map<const char*, size_t>& pinned_blocks() {
  static auto* blocks = new std::map<const char*, size_t>;
  return *blocks;
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> hold(pinned_mutex);
  auto next = pinned_blocks().upper_bound((const char*)address);
  if (next == pinned_blocks().begin()) return false;
  --next;
  return (const char*)address < next->first + next->second;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 64, std::max<size_t>(num_bytes, 64)) == 0, "no pinned memory");
    std::lock_guard<std::mutex> hold(pinned_mutex);
    pinned_blocks()[(const char*)address] = std::max<size_t>(num_bytes, 64);
    return {address, address, &give_back, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  static void give_back(void* address) {
    {
      std::lock_guard<std::mutex> hold(pinned_mutex);
      pinned_blocks().erase((const char*)address);
    }
    free(address);
  }
};

PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

// ---- a stray access of the host

struct sigaction before_ours;

void on_fault(int number, siginfo_t* info, void* context) {
  for (DeviceIndex index = 0; index < NUM_DEVICES; ++index) {
    const auto offset = (char*)info->si_addr - arena_of(index).device;
    if (offset < 0 || offset >= (ptrdiff_t)ARENA_BYTES) continue;
    char text[] = "simulated accelerator: the host touched memory of device ?\n";
    text[sizeof text - 3] = char('0' + index);
    if (write(2, text, sizeof text - 1) < 0) _exit(139);
  }
  sigaction(number, &before_ours, nullptr);  // the instruction is run again, and faults there
  (void)context;
}

// ---- what torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(KIND, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < NUM_DEVICES, "there is no simulated device ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream_of(device.index(), 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    const auto index = device.has_index() ? device.index() : current_device;
    std::lock_guard<std::mutex> hold(streams_mutex);
    auto& all = queues_of(index);
    all.push_back(new Queue);
    return stream_of(index, int64_t(all.size()) - 1);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    current_number(stream.device_index()) = stream.id();
    return before;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    auto& queue = queue_of(stream);
    *(Event*)*event = {&queue, queue.num_put()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const auto waits = *(Event*)event;
    auto& queue = queue_of(stream);
    if (waits.queue != &queue) queue.put([waits] { waits.queue->wait(waits.number); });
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || ((Event*)event)->queue->is_done(((Event*)event)->number);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) ((Event*)event)->queue->wait(((Event*)event)->number);
  }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  bool queryStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream);
    return queue.is_done(queue.num_put());
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory().used_on(pointer.get(), stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct DeviceGenerator final : at::CPUGeneratorImpl {  // the host's numbers, by a state of the device's own
  explicit DeviceGenerator(DeviceIndex index) {
    device_ = Device(KIND, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

std::optional<at::Generator>& default_generator(DeviceIndex index) {
  static auto* all = new std::optional<at::Generator>[NUM_DEVICES];
  return all[index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(KIND, index)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(KIND, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return *default_generator(index < 0 ? current_device : index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {  // the first of a device becomes its own
    const auto device = index < 0 ? current_device : index;
    auto made = at::make_generator<DeviceGenerator>(device);
    if (!default_generator(device)) default_generator(device) = made;
    return made;
  }
  Device getDeviceFromPtr(void* address) const override { return Device(KIND, device_of_address(address)); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::DeviceGuard there(storage.device());
    auto fresh = device_memory().allocate(num_bytes);
    const auto kept = std::min(storage.nbytes(), num_bytes);
    if (kept != 0) {
      char *to = inside(fresh.get()), *from = inside(storage.data());
      queue_of(current_stream(storage.device().index())).put([=] { std::memcpy(to, from, kept); });
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(num_bytes);
  }
};

// ---- operators

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard there(device.value_or(Device(KIND, current_device)));
  return at::detail::empty_generic(
      size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard there(device.value_or(Device(KIND, current_device)));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_the_device_sees_it(const at::Tensor& tensor) {  // the same numbers, as a tensor that the host may touch
  void* address = (char*)tensor.unsafeGetTensorImpl()->storage().data() + tensor.storage_offset() * tensor.itemsize();
  if (!tensor.is_cpu() && tensor.numel() != 0) address = inside(address);
  return at::from_blob(address, tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::CPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  const auto& on_device = source.is_cpu() ? target : source;
  const auto stream = current_stream(on_device.device().index());
  if (!source.is_cpu() && !target.is_cpu() && source.device() != target.device())
    synchronize(current_stream(target.device().index()));
  // Pageable memory is read now, pinned memory late, as by a device that reads it itself.
  const bool reads_late = non_blocking && is_pinned((source.is_cpu() ? source : target).storage().data());
  const auto from = source.is_cpu() && !reads_late ? source.clone() : as_the_device_sees_it(source);
  const auto to = as_the_device_sees_it(target);
  const auto host = target.is_cpu() ? target.storage() : source.is_cpu() ? source.storage() : c10::Storage();
  queue_of(stream).put([from, to, host] {
    at::AutoDispatchBelowADInplaceOrView plain;
    to.copy_(from);
  });
  if (target.is_cpu() ? !reads_late : !source.is_cpu() && source.device() != target.device()) synchronize(stream);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  return at::native::_local_scalar_dense_cpu(tensor.cpu());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(  // its schema does not say that it writes averages
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  auto hosts = [](const std::optional<at::Tensor>& one) {
    return one && one->defined() ? std::optional<at::Tensor>(one->cpu()) : std::nullopt;
  };
  const auto means = hosts(mean), variances = hosts(variance);
  auto [output, saved, inverse] = at::native::batch_norm_cpu(
      input.cpu(), hosts(weight), hosts(bias), means, variances, training, momentum, eps);
  if (means) copy_from(*means, *mean, false);
  if (variances) copy_from(*variances, *variance, false);
  const auto device = input.device();
  return {output.to(device), saved.to(device), inverse.to(device)};
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory().used_on(self.storage().data_ptr().get(), stream);
}

// Which device an operator's tensors lie on; it is an error if they lie on several, or some of them on the host.
std::optional<DeviceIndex> device_of_all(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const bool takes_hosts = name.find("index") != std::string::npos;  // of what an index says, as on every device
  std::optional<DeviceIndex> found;
  bool on_host = false;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device().type() != KIND) {
      on_host = on_host || tensor.dim() > 0;
      return;
    }
    TORCH_CHECK(
        !found || *found == tensor.device().index(), "simulated accelerator: ", name, " of tensors on devices ",
        int(found.value_or(0)), " and ", int(tensor.device().index()), ", which must lie on one");
    found = tensor.device().index();
  };
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensor()) look(argument.toTensor());
    if (argument.isTensorList())
      for (const auto& one : argument.toTensorVector()) look(one);
    if (argument.isOptionalTensorList())
      for (const std::optional<at::Tensor>& one : argument.toOptionalTensorList())
        if (one) look(*one);
  }
  TORCH_CHECK(!found || !on_host || takes_hosts, "simulated accelerator: ", name, " of tensors on it and on the host");
  return found;
}

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto device = device_of_all(op, stack).value_or(current_device);
  c10::DeviceGuard there(Device(KIND, device));
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack, true);
  auto drawn_from = at::detail::getPrivateUse1Hooks().getDefaultGenerator(device);
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i)
    if ((*stack)[i].isGenerator()) {
      drawn_from = (*stack)[i].toGenerator();
      (*stack)[i] = c10::IValue();
    }
  auto hosts = at::detail::getDefaultCPUGenerator();
  const auto before = hosts.get_state();
  hosts.set_state(drawn_from.get_state());
  at::native::cpu_fallback(op, stack, true);
  drawn_from.set_state(hosts.get_state());
  hosts.set_state(before);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("native_batch_norm", native_batch_norm);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("record_stream", record_stream);
  // By themselves these are composed of others here, and the host's own kernels round otherwise.
  for (const char* name : {"native_layer_norm", "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace

// ---- for `simulated.py`

extern "C" {
void simulated_start(int late_ms) {
  late = std::chrono::milliseconds(late_ms);
  static Hooks hooks;
  c10::SetAllocator(KIND, &device_memory());
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
void simulated_name_faults() {  // again, where others have taken the signal since
  for (DeviceIndex index = 0; index < NUM_DEVICES; ++index) arena_of(index);
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  struct sigaction before = {};
  sigaction(SIGSEGV, &ours, &before);
  if (before.sa_sigaction != on_fault) before_ours = before;
}
int simulated_current_device() { return current_device; }
void simulated_set_device(int index) { Guard().setDevice(Device(KIND, DeviceIndex(index))); }
}
