#include "kernels/rocm/launch.h"

#include <map>
#include <mutex>
#include <utility>

#include "kernels/rocm/code_objects.h"

namespace mla {
namespace {

// The thread's current device is `ordinal` for as long as this lives.
class CurrentDevice {
 public:
  CurrentDevice(const hip::Api& api, int32_t ordinal) : api_(api) {
    status_ = api.get_device(&before_);
    if (status_ != hip::kSuccess || before_ == ordinal) return;
    status_ = api.set_device(ordinal);
    changed_ = status_ == hip::kSuccess;
  }
  ~CurrentDevice() {
    if (changed_) api_.set_device(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  hip::Status status() const { return status_; }

 private:
  const hip::Api& api_;
  int before_ = 0;
  bool changed_ = false;
  hip::Status status_;
};

// What a thread may not do while its stream is captured, it may do in relaxed mode, as long as the stream has no part
// in it. Code is loaded at a kernel's first launch, which may be one that XLA captures.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const hip::Api& api) : api_(api) {
    exchanged_ = api.exchange_capture_mode(&mode_) == hip::kSuccess;
  }
  ~RelaxedCapture() {
    if (exchanged_) api_.exchange_capture_mode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const hip::Api& api_;
  hip::CaptureMode mode_ = hip::kCaptureRelaxed;
  bool exchanged_;
};

std::string number(const Device& device) { return "device " + std::to_string(device.ordinal); }

// What is known of each device, and what was loaded there. Entries stay; failures are not kept, so that a later call
// tries again.
class Loaded {
 public:
  Error info(const Device& device, const DeviceInfo** info) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = infos_.find(device.ordinal);
    if (known != infos_.end()) {
      *info = &known->second;
      return {};
    }
    const hip::Runtime& runtime = hip::runtime();
    if (runtime.api == nullptr) return runtime.error;
    hip::Properties properties{};
    const hip::Status status = runtime.api->get_properties(&properties, device.ordinal);
    if (status != hip::kSuccess) {
      return hip::failure("jax_mla: the properties of " + number(device) + " cannot be read", status);
    }
    DeviceInfo found;
    found.architecture = std::string(properties.bytes + hip::Properties::kArchitectureAt, 256).c_str();
    found.architecture = found.architecture.substr(0, found.architecture.find(':'));
    std::memcpy(&found.compute_units, properties.bytes + hip::Properties::kComputeUnitsAt, sizeof(int32_t));
    *info = &infos_.emplace(device.ordinal, std::move(found)).first->second;
    return {};
  }

  Error function(const Kernel& kernel, const Device& device, hip::Function* function) {
    const DeviceInfo* device_info = nullptr;
    Error error = info(device, &device_info);
    if (!error.empty()) return error;
    std::lock_guard<std::mutex> lock(mutex_);
    const std::pair<int32_t, std::string> key(device.ordinal, kernel.symbol);
    const auto known = functions_.find(key);
    if (known != functions_.end()) {
      *function = known->second;
      return {};
    }
    const RelaxedCapture relaxed(*hip::runtime().api);
    hip::Module module = nullptr;
    error = load(kernel, device, device_info->architecture, &module);
    if (!error.empty()) return error;
    const hip::Status status = hip::runtime().api->module_get_function(function, module, kernel.symbol);
    if (status != hip::kSuccess) {
      return hip::failure("jax_mla: the code of " + std::string(kernel.object) + " for " + device_info->architecture +
                              " has no " + kernel.symbol + " on " + number(device),
                          status);
    }
    functions_.emplace(key, *function);
    return {};
  }

 private:
  Error load(const Kernel& kernel, const Device& device, const std::string& architecture, hip::Module* module) {
    const std::pair<int32_t, std::string> key(device.ordinal, kernel.object);
    const auto known = modules_.find(key);
    if (known != modules_.end()) {
      *module = known->second;
      return {};
    }
    const CodeObject* object = nullptr;
    std::string others;
    for (size_t i = 0; i < kCodeObjectCount; ++i) {
      if (std::strcmp(kCodeObjects[i].name, kernel.object) != 0) continue;
      if (architecture == kCodeObjects[i].architecture) object = &kCodeObjects[i];
      others += (others.empty() ? "" : ", ") + std::string(kCodeObjects[i].architecture);
    }
    if (object == nullptr) {
      return "jax_mla: " + number(device) + " is a " + architecture + ", and " + kernel.object + " was built for " +
             others;
    }
    const hip::Status status = hip::runtime().api->module_load_data(module, object->image);
    if (status != hip::kSuccess) {
      return hip::failure("jax_mla: loading the code of " + std::string(kernel.object) + " for " + architecture + " (" +
                              std::to_string(object->bytes) + " bytes) on " + number(device) + " failed",
                          status);
    }
    modules_.emplace(key, *module);
    return {};
  }

  std::mutex mutex_;
  std::map<int32_t, DeviceInfo> infos_;
  std::map<std::pair<int32_t, std::string>, hip::Module> modules_;
  std::map<std::pair<int32_t, std::string>, hip::Function> functions_;
};

// Never destroyed: threads of the runtime may launch until the process ends.
Loaded& loaded() {
  static auto* all = new Loaded;
  return *all;
}

}  // namespace

Error device_info(const Device& device, const DeviceInfo** info) { return loaded().info(device, info); }

Error launch_packed(const Kernel& kernel, const LaunchShape& shape, const Device& device, void* arguments,
                    size_t bytes) {
  const hip::Runtime& runtime = hip::runtime();
  if (runtime.api == nullptr) return runtime.error;
  const CurrentDevice current(*runtime.api, device.ordinal);
  if (current.status() != hip::kSuccess) {
    return hip::failure("jax_mla: " + number(device) + " cannot be made the current one", current.status());
  }
  hip::Function function = nullptr;
  const Error error = loaded().function(kernel, device, &function);
  if (!error.empty()) return error;
  void* extra[] = {hip::kLaunchBuffer, arguments, hip::kLaunchBytes, &bytes, hip::kLaunchEnd};
  const hip::Status status =
      runtime.api->module_launch_kernel(function, shape.grid.x, shape.grid.y, shape.grid.z, shape.block.x,
                                        shape.block.y, shape.block.z, shape.lds_bytes, device.stream, nullptr, extra);
  if (status == hip::kSuccess) return {};
  const auto text = [](const Dim3& d) {
    return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
  };
  return hip::failure("jax_mla: launching " + std::string(kernel.symbol) + " with grid " + text(shape.grid) +
                          ", block " + text(shape.block) + " and " + std::to_string(shape.lds_bytes) +
                          " bytes of dynamic LDS on " + number(device) + " failed",
                      status);
}

}  // namespace mla
