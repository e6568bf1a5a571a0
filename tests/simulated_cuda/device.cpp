// The parts of a device that torch without CUDA lacks: a device guard (without effect here), and the release of a
// tensor's memory, which may happen while Python cannot run: it is recorded, and read later.
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

// Moves up to `room` released blocks to `into`; returns their number.
extern "C" int take_given_back(void** into, int room) {
  std::lock_guard<std::mutex> hold(lock);
  int count = 0;
  while (count < room && !given_back.empty()) {
    into[count++] = given_back.back();
    given_back.pop_back();
  }
  return count;
}
