// The parts of a device that torch without CUDA lacks: a device guard (without effect here), the release of a tensor's
// memory, which may happen while Python cannot run (it is recorded, and read later), and new memory for a storage.
#include <c10/core/StorageImpl.h>
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

// Replaces a storage's memory, which is released; tensors over the storage stay. `managed` is of the new memory.
extern "C" void replace_memory(void* storage, void* data, int64_t bytes, void* managed, int device) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  impl->set_data_ptr_noswap(c10::DataPtr(data, managed, &give_back, c10::Device(c10::kCUDA, device)));
  impl->set_nbytes(static_cast<size_t>(bytes));
}
