// Fibers: threads of control within one OS thread, which switch voluntarily.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {

constexpr size_t STACK_BYTES = 256 << 10;

#ifdef __x86_64__

// Saves the registers that a call preserves on this stack, and continues on another one.
extern "C" void emulator_switch(void** from, void* to);

struct Context {
    void* stack_pointer = nullptr;

    void prepare(char* stack, unsigned number, void (*entry)()) {
        // Stacks begin at different lines of their pages; otherwise all of them would compete for the same cache lines.
        size_t begin = STACK_BYTES - number % 16 * 192;
        // The return address is where a call would have put it: at the end of 16 aligned bytes.
        void** top = reinterpret_cast<void**>(stack + begin - 16);
        *top = reinterpret_cast<void*>(entry);
        stack_pointer = top - 6;
    }
    void switch_to(Context& other) { emulator_switch(&stack_pointer, other.stack_pointer); }
    // Fetches what a fiber uses first when it continues.
    void prefetch() const {
        for (int line = 0; line < 6; line++) __builtin_prefetch(static_cast<char*>(stack_pointer) + 64 * line);
    }
};

#else

struct Context {
    ucontext_t context;

    void prepare(char* stack, unsigned, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = STACK_BYTES;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }
    void switch_to(Context& other) { swapcontext(&context, &other.context); }
    void prefetch() const {}
};

#endif

// Returns a stack that is aligned to its size: the upper bits of an address show whether it is on the current stack.
// Several stacks share a huge page. In small pages, a switch would wait for the translation of an address most of the
// time: the threads of a block use more pages than a processor has translations.
inline char* new_stack() {
    constexpr size_t HUGE_PAGE = 2 << 20;
    static std::mutex lock;
    static char* page;
    static size_t left = 0;
    std::lock_guard<std::mutex> guard(lock);
    if (!left) {
        void* p = mmap(nullptr, 2 * HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) abort();
        size_t before = -reinterpret_cast<uintptr_t>(p) % HUGE_PAGE;
        page = static_cast<char*>(p) + before;
        if (before) munmap(p, before);
        munmap(page + HUGE_PAGE, HUGE_PAGE - before);
        // Fails where the system has none.
        (void)madvise(page, HUGE_PAGE, MADV_HUGEPAGE);
        left = HUGE_PAGE / STACK_BYTES;
    }
    return page + --left * STACK_BYTES;
}

}  // namespace emulator
