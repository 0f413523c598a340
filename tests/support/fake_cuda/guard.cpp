// A device guard and hooks for a CUDA device that is not there, for a CPU build of torch: tensors may be on cuda:0, and
// autograd runs their backward in its thread for that device. Pinned memory is memory of the CPU that is remembered.
// Nothing computes.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

std::mutex mutex;
std::map<const char*, size_t> pinned;  // the end of each range by its start

void unpin(void* start) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(static_cast<const char*>(start));
  }
  c10::GetCPUAllocator()->raw_deleter()(start);
}

struct PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = c10::GetCPUAllocator()->raw_allocate(size);
    const std::lock_guard<std::mutex> lock(mutex);
    pinned[static_cast<const char*>(start)] = size;
    return {start, start, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

struct Hooks : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isPinnedPtr(const void* data) const override {
    const auto at = static_cast<const char*>(data);
    const std::lock_guard<std::mutex> lock(mutex);
    auto after = pinned.upper_bound(at);
    return after != pinned.begin() && at < (--after)->first + after->second;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
