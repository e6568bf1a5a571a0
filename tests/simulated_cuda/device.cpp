// What a torch without CUDA lacks of a device: a guard that selects one (here there is nothing to select), and the end
// of a tensor's memory, which may come while Python cannot run: it is noted, and asked for later.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>
#include <vector>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}

static std::mutex lock;
static std::vector<void*> given_back;

// A DLPack deleter.
extern "C" void give_back(void* managed) {
  std::lock_guard<std::mutex> hold(lock);
  given_back.push_back(managed);
}

// Moves up to `room` of them to `into`; returns how many.
extern "C" int take_given_back(void** into, int room) {
  std::lock_guard<std::mutex> hold(lock);
  int count = 0;
  while (count < room && !given_back.empty()) {
    into[count++] = given_back.back();
    given_back.pop_back();
  }
  return count;
}
