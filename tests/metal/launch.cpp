// The program's entry: buffers in, one launch, outputs out; and the memory they live in.
//
//     KERNEL gx gy gz tx ty tz seed NAME:bytes:grain:kind ...   contents on stdin, outputs on stdout, faults on stderr
//
// kind: `in` is read from stdin and may not be written; `out` starts as NaN; `set` is read and may be written.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "memory.h"

// Of the address sanitizer, where the program is linked with it.
extern "C" void __asan_poison_memory_region(void const volatile*, size_t) __attribute__((weak));
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t) __attribute__((weak));
extern "C" void __asan_set_error_report_callback(void (*)(const char*)) __attribute__((weak));
extern "C" void* __asan_get_report_address() __attribute__((weak));

#if defined(__ELF__)
extern "C" const char __ehdr_start[];  // where the program lies; from the linker
#endif

namespace machine {

namespace {

constexpr uintptr_t PAGE = 16384, GUARD = 64 * PAGE;

struct SharedArray {
  Place place;
  size_t bytes;
  bool live;  // declared by the running threadgroup
};
SharedArray arrays[ARRAYS];
int array_count;
size_t shared_bytes;

uintptr_t round_up(uintptr_t n, uintptr_t to) { return (n + to - 1) / to * to; }

void reserve() {
  void* range = mmap(nullptr, SLOT * SLOTS, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) fail("no addresses for the buffers");
  state.arena = uintptr_t(range);
}

// Usable bytes in the middle of a slot, whose end is that of a page: what runs past it stops without a sanitizer too.
void* place_in_slot(int slot, const char* name, size_t bytes, size_t grain, Memory kind, bool writable) {
  const uintptr_t end_of_page = state.arena + slot * SLOT + SLOT / 2;
  const uintptr_t begin = end_of_page - round_up(bytes, 16), page = begin / PAGE * PAGE;
  if (bytes > SLOT / 4) fail("buffer `%s` of %zu bytes is too large to emulate", name, bytes);
  if (end_of_page > page && mprotect(reinterpret_cast<void*>(page), end_of_page - page, PROT_READ | PROT_WRITE))
    fail("no memory for buffer `%s`", name);
  if (__asan_poison_memory_region) {
    __asan_poison_memory_region(reinterpret_cast<void*>(page - GUARD), end_of_page - page + 2 * GUARD);
    __asan_unpoison_memory_region(reinterpret_cast<void*>(begin), bytes);
  }
  Cell* cells = writable ? static_cast<Cell*>(calloc(bytes / grain + 1, sizeof(Cell))) : nullptr;
  state.regions[slot] = {name, begin, begin + bytes, grain, cells, kind};
  return reinterpret_cast<void*>(begin);
}

void protect_slot(void* data, size_t bytes) {
  const uintptr_t page = uintptr_t(data) / PAGE * PAGE;
  mprotect(reinterpret_cast<void*>(page), uintptr_t(data) + round_up(bytes, 16) - page, PROT_READ);
}

void read_all(void* to, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = read(0, static_cast<char*>(to) + done, bytes - done);
    if (n <= 0) fail("the inputs end early");
    done += size_t(n);
  }
}

void write_all(const void* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = write(1, static_cast<const char*>(from) + done, bytes - done);
    if (n <= 0) _exit(4);
    done += size_t(n);
  }
}

void on_fault(int signal, siginfo_t* info, void*) {
  char text[256];
  if (signal == SIGILL) fail("trapped, most likely outside of a thread's own array");  // clang's -fsanitize=bounds
  describe(uintptr_t(info->si_addr), text, sizeof text);
  fail("%s %s", signal == SIGFPE ? "integer division by zero at" : "access outside of every buffer:", text);
}

void on_asan_report(const char*) {
  char text[256];
  describe(uintptr_t(__asan_get_report_address()), text, sizeof text);
  dprintf(2, "metal: the address sanitizer stopped thread %u, at %s\n", state.ids ? state.ids->index : 0, text);
}

void catch_faults() {
  static char stack[64 << 10];
  stack_t alternate{};
  alternate.ss_sp = stack, alternate.ss_size = sizeof stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, nullptr);
  if (__asan_set_error_report_callback) __asan_set_error_report_callback(on_asan_report);
}

}  // namespace

void fail(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  dprintf(2, "metal: %s", text);
  if (const Ids* at = state.ids)
    dprintf(2, " (thread %u of threadgroup %u %u %u)", at->index, at->group[0], at->group[1], at->group[2]);
#if defined(__ELF__)  // for addr2line, which emulator.py asks
  if (state.code) dprintf(2, " [code %#zx]", size_t(static_cast<const char*>(state.code) - __ehdr_start) - 1);
#endif
  dprintf(2, "\n");
  _exit(3);
}

void describe(uintptr_t at, char* text, size_t size) {
  const uintptr_t slot = (at - state.arena) >> SLOT_BITS;
  if (slot >= SLOTS || !state.regions[slot].name) {
    snprintf(text, size, "address %#zx", size_t(at));
    return;
  }
  const Region& region = state.regions[slot];
  const char* what = region.kind == threadgroup_memory ? "threadgroup memory" : "buffer";
  const size_t bytes = region.end - region.begin;
  if (at < region.begin)
    snprintf(text, size, "%zu bytes before %s `%s` of %zu bytes", size_t(region.begin - at), what, region.name, bytes);
  else if (at >= region.end)
    snprintf(text, size, "%zu bytes past the end of %s `%s` of %zu bytes", size_t(at - region.end), what, region.name,
             bytes);
  else
    snprintf(text, size, "byte %zu of %s `%s`", size_t(at - region.begin), what, region.name);
}

void forget_shared() {
  for (int i = 0; i < array_count; i++) arrays[i].live = false;
  shared_bytes = 0;
}

void* shared(const char* name, size_t bytes, size_t grain, Place place) {
  int i = 0;
  while (i < array_count && (arrays[i].place.line() != place.line() || arrays[i].place.column() != place.column())) i++;
  const int slot = BUFFERS + i;
  if (i == array_count) {
    if (i == ARRAYS) fail("more than %d threadgroup variables", ARRAYS);
    arrays[array_count++] = {place, bytes, false};
    place_in_slot(slot, name, bytes, grain, threadgroup_memory, true);
  }
  const Region& region = state.regions[slot];
  if (!arrays[i].live) {
    arrays[i].live = true;
    shared_bytes += round_up(bytes, 16);
    if (shared_bytes > MAX_SHARED_BYTES)
      fail("%zu bytes of threadgroup memory with `%s`: a threadgroup has %u", shared_bytes, name, MAX_SHARED_BYTES);
    memset(reinterpret_cast<void*>(region.begin), 0xff, bytes);  // NaN in every type that has one
  }
  return reinterpret_cast<void*>(region.begin);
}

}  // namespace machine

int main(int count, char** words) {
  using namespace machine;
  uint32_t grid[3], size[3];
  for (int d = 0; d < 3; d++) grid[d] = uint32_t(atol(words[1 + d])), size[d] = uint32_t(atol(words[4 + d]));
  catch_faults();
  reserve();
  std::vector<void*> buffers;
  std::vector<std::pair<void*, size_t>> outputs;
  for (int i = 8; i < count; i++) {
    char* const name = strtok(words[i], ":");
    const size_t bytes = size_t(atoll(strtok(nullptr, ":"))), grain = size_t(atoll(strtok(nullptr, ":")));
    const std::string kind = strtok(nullptr, ":");
    void* const data = place_in_slot(i - 8, name, bytes, grain, device_memory, kind != "in");
    if (kind == "out")
      memset(data, 0xff, bytes);
    else
      read_all(data, bytes);
    if (kind == "in") protect_slot(data, bytes);
    if (kind != "in") outputs.emplace_back(data, bytes);
    buffers.push_back(data);
  }
  run(grid, size, uint32_t(atol(words[7])), buffers.data());
  for (auto [data, bytes] : outputs) write_all(data, bytes);
}
