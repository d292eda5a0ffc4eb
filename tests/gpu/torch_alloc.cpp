// Cost of PyTorch's caching allocator called from C++: nanoseconds to allocate and free 1 MiB, median of nine runs.
// alloc.sh compiles and runs it if PyTorch for CUDA is installed.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

int main() {
  constexpr int pairs = 300000, runs = 9;
  namespace allocator = c10::cuda::CUDACachingAllocator;
  allocator::init(c10::cuda::device_count());
  std::vector<double> times;
  for (int run = 0; run <= runs; run++) {
    const auto start = std::chrono::steady_clock::now();
    for (int pair = 0; pair < pairs; pair++) allocator::raw_delete(allocator::raw_alloc(1 << 20));
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    if (run > 0) times.push_back(time.count() / pairs);  // the first run fills the cache
  }
  std::sort(times.begin(), times.end());
  std::printf("  %-46s%12.1f\n", "PyTorch's caching allocator, from C++", times[runs / 2]);
}
