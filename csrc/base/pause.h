/* The processor's hint for loops that spin on a word. */
#ifndef FSDPC_PAUSE_H
#define FSDPC_PAUSE_H

static inline void
fsdpc_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#endif
