// What the host asks a device once.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>

namespace flash_csa::sm90 {

// A Value of every device, each made by the first thread that asks for it with the device current.
template <class Value>
class PerDevice {
  public:
    template <class Make>
    const Value& of_current(const Make& make) {
        int device = 0;
        cudaGetDevice(&device);
        const std::lock_guard lock(mutex_);
        const auto found = made_.find(device);
        return found != made_.end() ? found->second : made_.emplace(device, make()).first->second;
    }

  private:
    std::mutex mutex_;
    std::map<int, Value> made_;  // which stay where they are
};

}  // namespace flash_csa::sm90
