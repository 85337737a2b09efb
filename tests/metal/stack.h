// Switching between stacks: a few instructions and no system call, unlike swapcontext. Included by machine.cpp alone.
#pragma once

// Saves the callee-saved registers on this stack and goes on with another: no system call, unlike swapcontext.
extern "C" void switch_stack(void** save, void* to) asm("switch_stack");
#if defined(__x86_64__)
asm(R"(
.text
.globl switch_stack
switch_stack:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl switch_stack
switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the Metal emulator switches stacks on x86-64 and aarch64 only"
#endif

// A stack below `top` (a multiple of 16 bytes) on which `entry`, which must not return, starts when switched to.
inline void* new_stack(char* top, void (*entry)()) {
#if defined(__x86_64__)
  void** const frame = reinterpret_cast<void**>(top) - 8;  // six registers, where to return to, and alignment
  frame[6] = reinterpret_cast<void*>(entry);
#else
  void** const frame = reinterpret_cast<void**>(top) - 20;  // x19 to x30, then d8 to d15
  frame[11] = reinterpret_cast<void*>(entry);
#endif
  return frame;
}
