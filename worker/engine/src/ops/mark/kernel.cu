// Counts a mark, and reads or restarts the timer.

struct MarkState {
    unsigned long long count;
    unsigned long long begin;  // in nanoseconds
};

// *passed, in host memory, becomes the number of marks so far. `seconds`, if not null, becomes the time since the last
// mark for which it was null. One thread.
extern "C" __global__ void mark(MarkState* state, volatile unsigned long long* passed, float* seconds) {
    pdl_wait_and_launch();
    unsigned long long now = global_timer();
    if (seconds) {
        *seconds = (float)(now - state->begin) * 1e-9f;
    } else {
        state->begin = now;
    }
    *passed = ++state->count;
}
