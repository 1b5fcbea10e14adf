#include <cstdio>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>

#include "cuda/launch.h"
#include "peer/group/group.h"
#include "peer/group/threads.h"

namespace mxep::cuda {
namespace {

constexpr const char* kOp = "PeerMemory";

// What a rank tells another one. call: of an op and its sizes, equal on all ranks.
struct Sent {
  int64_t rows, slots, numbers, call;
};

// Two meetings in a row use two entries: a rank that is at the next meeting has left the one before, but a rank at this
// one may still read.
struct SignalPad {
  uint32_t meetings;             // that this rank has ended
  uint32_t arrived[kMostPeers];  // meetings that each rank has come to
  Sent sent[2][kMostPeers];
  Peer peers[kMostPeers];  // what was sent last, at addresses of this process
};
static_assert(sizeof(SignalPad) <= kSignalPadBytes);

struct Meeting {
  SignalPad* pads[kMostPeers];
  int64_t shifts[kMostPeers];
  int count, rank;
  uint64_t limit;  // nanoseconds
};

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ void store_release(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__global__ void __launch_bounds__(32) meet(const __grid_constant__ Meeting m, Sent mine, const int32_t* rank) {
  const int i = threadIdx.x;
  if (rank && *rank != m.rank) {
    if (i == 0)
      printf("%s: got rank %d of the mesh axis; allowed: %d, the GPU's rank on the mesh of PeerMemory\n", kOp, *rank,
             m.rank);
    __trap();
  }
  SignalPad* own = m.pads[m.rank];
  const uint32_t meeting = own->meetings + 1;
  __syncwarp();
  if (i < m.count) {
    m.pads[i]->sent[meeting % 2][m.rank] = mine;
    store_release(&m.pads[i]->arrived[m.rank], meeting);
    const uint64_t begin = nanoseconds();
    while (static_cast<int32_t>(load_acquire(&own->arrived[i]) - meeting) < 0)
      if (nanoseconds() - begin > m.limit) {
        printf("%s: rank %d waited %.1f s for rank %d of %d, which did not come\n", kOp, m.rank, m.limit * 1e-9, i,
               m.count);
        __trap();
      }
    const volatile Sent& from = own->sent[meeting % 2][i];
    if (from.call != mine.call) {
      printf("%s: rank %d is at another call than rank %d; allowed: one program on all ranks\n", kOp, i, m.rank);
      __trap();
    }
    own->peers[i] = {reinterpret_cast<const char*>(from.rows + m.shifts[i]),
                     reinterpret_cast<char*>(from.slots + m.shifts[i]),
                     reinterpret_cast<char*>(from.numbers + m.shifts[i])};
  }
  __syncwarp();
  if (i == 0) own->meetings = meeting;
}

// Lets kernels of the current device read the memory of a GPU of this process.
void allow(int device, int peer) {
  if (peer < 0 || device == peer) return;
  int possible;
  check(kOp, cudaDeviceCanAccessPeer(&possible, device, peer));
  if (!possible)
    throw std::runtime_error(std::string(kOp) + ": GPU " + std::to_string(device) + " cannot read the memory of GPU " +
                             std::to_string(peer) + "; allowed: GPUs that are peers, or transport=None");
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();  // which would report it to another library
  else
    check(kOp, status);
}

// A number of the op, its sizes and its attributes.
int64_t number_of(const PeerOp& op, const Call& call) {
  uint64_t hash = 1;
  const auto add = [&](int64_t value) { hash = hash * 1000003 + static_cast<uint64_t>(value); };
  for (const char* c = op.name; *c; ++c) add(*c);
  add(call.in[0].dim(0)), add(call.in[0].dim(1));
  for (const int64_t value : call.attrs) add(value);
  return static_cast<int64_t>(hash);
}

struct Groups {
  std::shared_mutex mutex;
  std::map<int64_t, Group*> of;
};

// The groups that live: a call of XLA has a number, and no object.
Groups& groups() {
  static Groups all;
  return all;
}

}  // namespace

struct Group::State {
  struct OfDevice {
    Meeting meeting;
    int64_t begin, nbytes;
    cudaStream_t side;
  };
  int64_t number;
  Threads threads;
  std::map<int, OfDevice> devices;

  const OfDevice& here(const char* op) const {
    int device;
    check(op, cudaGetDevice(&device));
    const auto found = devices.find(device);
    if (found == devices.end())
      throw std::invalid_argument(std::string(op) + " of peers: got GPU " + std::to_string(device) +
                                  "; allowed: the GPUs of the mesh of PeerMemory");
    return found->second;
  }
};

Group::Group(int64_t number, const std::vector<Member>& members, std::chrono::milliseconds limit)
    : state_(new State{number, Threads(members.size(), limit), {}}) {
  for (const Member& member : members) {
    const size_t ranks = member.pads.size();
    if (ranks > kMostPeers || member.shifts.size() != ranks || member.ordinals.size() != ranks || member.rank < 0 ||
        static_cast<size_t>(member.rank) >= ranks)
      throw std::invalid_argument(std::string(kOp) + ": ranks: got " + std::to_string(ranks) + "; allowed: at most " +
                                  std::to_string(kMostPeers));
    const CurrentDevice current(kOp, member.device);
    State::OfDevice found{};
    found.meeting.count = static_cast<int>(ranks), found.meeting.rank = member.rank;
    found.meeting.limit = static_cast<uint64_t>(std::chrono::nanoseconds(limit).count());
    for (size_t i = 0; i < ranks; ++i) {
      allow(member.device, member.ordinals[i]);
      found.meeting.pads[i] = reinterpret_cast<SignalPad*>(member.pads[i]);
      found.meeting.shifts[i] = member.shifts[i];
    }
    found.begin = member.begin, found.nbytes = member.nbytes;
    check(kOp, cudaStreamCreateWithPriority(&found.side, cudaStreamNonBlocking, -1));
    state_->devices[member.device] = found;
  }
  const std::unique_lock lock(groups().mutex);
  groups().of[number] = this;
}

Group::~Group() {
  {
    const std::unique_lock lock(groups().mutex);
    groups().of.erase(state_->number);
  }
  for (const auto& [device, of] : state_->devices) {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    cudaDeviceSynchronize();  // kernels may still use memory of other processes
    cudaStreamDestroy(of.side);
    cudaSetDevice(before);
  }
}

void Group::test() {
  for (const auto& [device, of] : state_->devices) {
    const CurrentDevice current(kOp, device);
    launch_kernel(kOp, meet, 1, 32, 0, of.side, of.meeting, Sent{}, nullptr);
  }
  for (const auto& [device, of] : state_->devices) {
    const CurrentDevice current(kOp, device);
    check(kOp, cudaStreamSynchronize(of.side));
  }
}

void Group::run(int64_t number, const PeerOp& op, const Call& call, cudaStream_t stream) {
  const std::shared_lock lock(groups().mutex);
  const auto group = groups().of.find(number);
  if (group == groups().of.end())
    throw std::invalid_argument(std::string(op.name) +
                                " of peers: its PeerMemory was deleted; allowed: one that lives");
  State& state = *group->second->state_;
  const State::OfDevice& here = state.here(op.name);
  const auto address = [&](const Array& array) {
    const auto at = reinterpret_cast<int64_t>(array.data);
    if (here.nbytes && (at < here.begin || at >= here.begin + here.nbytes))
      throw std::runtime_error(
          std::string(op.name) +
          " of peers: an array is in memory that XLA allocated after PeerMemory was made; allowed: "
          "XLA_PYTHON_CLIENT_PREALLOCATE=true, its default");
    return at;
  };
  const bool writes = call.out.size() > 1;
  const Sent mine{address(call.in[0]), address(call.out[0]), writes ? address(call.out[1]) : 0, number_of(op, call)};
  int device;
  check(op.name, cudaGetDevice(&device));
  launch_kernel(op.name, meet, 1, 32, 0, stream, here.meeting, mine, call.in[2].as<const int32_t>());
  state.threads.join(device);
  op.run(call, {here.meeting.pads[here.meeting.rank]->peers, here.meeting.count, here.side}, stream);
  launch_kernel(op.name, meet, 1, 32, 0, stream, here.meeting, Sent{0, 0, 0, ~mine.call}, nullptr);
  state.threads.join(device);
}

}  // namespace mxep::cuda
