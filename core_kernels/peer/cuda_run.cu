// The devices of a run exchange addresses, and their streams wait for each other.
//
//   stream of device 0   work | ready --. .--> kernel reads all rows | done --. .--> work
//   stream of device 1   work | ready ---X---> kernel reads all rows | done ---X---> work
//                                     meeting                             meeting
//
// The host waits for the threads of the other devices, which then have recorded their events, and for no GPU. A GPU
// waits for events of streams, not in a kernel: kernels of other streams and programs go on.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "cuda/launch.h"
#include "peer/meeting.h"
#include "peer/peers.h"

namespace mxep::cuda {
namespace {

constexpr std::chrono::minutes kLimit(10);

// An event at the end of a stream's work so far. It lives as long as a device may wait for it.
class Recorded {
 public:
  Recorded(const char* op, cudaStream_t stream) {
    check(op, cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    const cudaError_t status = cudaEventRecord(event_, stream);
    if (status != cudaSuccess) cudaEventDestroy(event_);
    check(op, status);
  }
  ~Recorded() { cudaEventDestroy(event_); }
  Recorded(const Recorded&) = delete;
  cudaEvent_t event() const { return event_; }

 private:
  cudaEvent_t event_;
};

struct Arrival {
  std::string error;
  const PeerOp* op;
  int64_t rows, width;
  Peer peer;
  int device;
  std::shared_ptr<const Recorded> event;
};

int current_device(const char* op) {
  int device;
  check(op, cudaGetDevice(&device));
  return device;
}

// Lets kernels of the current device read the memory of a peer, as long as the process lives. Once per pair: while a
// stream is captured, CUDA may refuse the call.
void allow(const char* op, int device, int peer) {
  static std::array<std::atomic<uint64_t>, 64> allowed;  // of each device, a bit per peer
  if (device == peer) return;
  std::atomic<uint64_t>& peers = allowed.at(device);
  const uint64_t bit = uint64_t{1} << peer;
  if (peers.load() & bit) return;
  int possible;
  check(op, cudaDeviceCanAccessPeer(&possible, device, peer));
  if (!possible)
    throw std::runtime_error(std::string(op) + ": GPU " + std::to_string(device) + " cannot read the memory of GPU " +
                             std::to_string(peer) + "; allowed: GPUs that are peers, or transport='all_to_all'");
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();  // which would report it to another library
  else
    check(op, status);
  peers |= bit;
}

}  // namespace

void run_with_peers(const PeerOp& op, const Call& call, int64_t run, int64_t devices, cudaStream_t stream) {
  static Meetings<Arrival> meetings;
  const auto meet = [&](Arrival mine) {
    try {
      return meetings.meet(run, static_cast<size_t>(devices), std::move(mine), kLimit);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(std::string(op.name) + " of peers: " + error.what());
    }
  };
  const auto require_none = [](const std::vector<Arrival>& arrived) {
    for (const Arrival& a : arrived)
      if (!a.error.empty()) throw std::runtime_error(a.error);
  };
  const Array& rows = call.in[0];
  const auto* place = call.in[2].as<const int32_t>();
  Arrival mine{"",
               &op,
               rows.dim(0),
               rows.dim(1),
               {rows.data, place, call.out[0].data, call.out.size() > 1 ? call.out[1].data : nullptr},
               current_device(op.name),
               nullptr};
  // A device that fails still meets the others, which would wait for it.
  const auto attempt = [&](const auto& step) {
    try {
      step();
    } catch (const std::exception& error) {
      mine.error = error.what();
    }
  };
  attempt([&] {
    if (devices > kMostPeers)
      throw std::runtime_error(std::string(op.name) + " of peers: devices: got " + std::to_string(devices) +
                               "; allowed: " + std::to_string(kMostPeers));
    mine.event = std::make_shared<Recorded>(op.name, stream);
  });
  const std::vector<Arrival> ready = meet(mine);
  attempt([&] {
    require_none(ready);
    Peers peers{{}, 0, place};
    for (const Arrival& a : ready) {
      if (a.op != &op || a.rows != mine.rows || a.width != mine.width)
        throw std::runtime_error(std::string(op.name) + " of peers: another device is at " + a.op->name +
                                 " or has rows of another shape; allowed: one program on all devices");
      allow(op.name, mine.device, a.device);
      check(op.name, cudaStreamWaitEvent(stream, a.event->event(), 0));
      peers.of[peers.count++] = a.peer;
    }
    op.run(call, peers, stream);
    mine.event = std::make_shared<Recorded>(op.name, stream);
  });
  const std::vector<Arrival> done = meet(mine);
  for (const Arrival& a : done)  // also after an error: who could launch reads this device's rows
    if (a.event) check(op.name, cudaStreamWaitEvent(stream, a.event->event(), 0));
  require_none(done);
}

}  // namespace mxep::cuda
