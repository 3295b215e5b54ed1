// Lets a CPU build of PyTorch run autograd over tensors whose device is "cuda:0". The guard and the hooks only state
// that there is one device with one stream; no CUDA function is called and no kernel is provided.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct OneDeviceGuard final : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device getDevice() const override { return c10::Device(kCuda, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kCuda, 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, OneDeviceGuard)

namespace at {

struct OneDeviceHooks final : CUDAHooksInterface {
  explicit OneDeviceHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

using CUDAHooks = OneDeviceHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
