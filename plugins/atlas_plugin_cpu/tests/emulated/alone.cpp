// What the programs need of a C library, where none is at hand for the processor: building one takes a compiler minutes.
// It is compiled without built-in functions, or a loop that copies would become a call of memcpy.

#include <stddef.h>
#include <stdint.h>

extern "C" {

int main();

void* memcpy(void* to, const void* from, size_t count) {
    for (size_t i = 0; i < count; ++i) static_cast<uint8_t*>(to)[i] = static_cast<const uint8_t*>(from)[i];
    return to;
}

void* memset(void* to, int value, size_t count) {
    for (size_t i = 0; i < count; ++i) static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(value);
    return to;
}

void* aligned_alloc(size_t alignment, size_t count) {
    alignas(64) static uint8_t memory[1 << 24];
    static size_t used = 0;
    used = (used + alignment - 1) / alignment * alignment;
    uint8_t* start = memory + used;
    used += count;
    if (used > sizeof memory) __builtin_trap();
    return start;
}

void free(void*) {}

#if defined __aarch64__

long write(int file, const void* from, size_t count) {
    register long number asm("x8") = 64;
    register long first asm("x0") = file;
    register const void* second asm("x1") = from;
    register size_t third asm("x2") = count;
    asm volatile("svc #0" : "+r"(first) : "r"(number), "r"(second), "r"(third) : "memory");
    return first;
}

asm(".globl _start\n_start: bl main\n mov x8, #94\n svc #0\n");

#elif defined __x86_64__

long write(int file, const void* from, size_t count) {
    long number = 1;
    asm volatile("syscall" : "+a"(number) : "D"(file), "S"(from), "d"(count) : "rcx", "r11", "memory");
    return number;
}

asm(".globl _start\n_start: call main\n movl %eax, %edi\n movl $231, %eax\n syscall\n");

#endif
}
