// torch's accelerator, thread by thread.
//
// torch has one accelerator a process: PrivateUse1 as soon as a backend has taken that name, CUDA
// only otherwise. Autograd takes streams of the accelerator alone, so that in a process with device
// lazygt any backward pass of CUDA tensors ends in an internal assert (pytorch/pytorch#161129), and
// host memory is pinned for nobody. torch decides in at::accelerator::getAccelerator, which asks
// c10::is_privateuse1_backend_registered in another library: by way of an entry of its global
// offset table, which is pointed at a function of ours here.
#include "module.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceType.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace lazygt {
namespace {
constexpr const char* ASKED = "_ZN3c1033is_privateuse1_backend_registeredEv";

thread_local bool is_ours = false;

bool registered_for_thread() { return is_ours && c10::is_privateuse1_backend_registered(); }

struct Library {
  const void* inside;  // an address of the library that is looked for
  ElfW(Addr) base = 0;
  const ElfW(Dyn)* dynamic = nullptr;
};

int find_library(dl_phdr_info* info, size_t, void* data) {
  auto& library = *static_cast<Library*>(data);
  auto address = reinterpret_cast<ElfW(Addr)>(library.inside);
  bool holds = false;
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    auto start = info->dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD && address >= start && address < start + segment.p_memsz) holds = true;
    if (segment.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(start);
  }
  if (!holds) return 0;
  library.base = info->dlpi_addr;
  library.dynamic = dynamic;
  return 1;
}

ElfW(Addr) entry_of(const ElfW(Dyn)* dynamic, ElfW(Sxword) tag) {
  for (auto* entry = dynamic; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == tag) return entry->d_un.d_val;
  }
  return 0;
}

// The place of the global offset table by which a library calls a function; null: it has none.
void** place_of(const Library& library, const char* function) {
  auto* symbols = reinterpret_cast<const ElfW(Sym)*>(entry_of(library.dynamic, DT_SYMTAB));
  auto* names = reinterpret_cast<const char*>(entry_of(library.dynamic, DT_STRTAB));
  const std::pair<ElfW(Sxword), ElfW(Sxword)> tables[] = {{DT_JMPREL, DT_PLTRELSZ}, {DT_RELA, DT_RELASZ}};
  for (auto [table, size] : tables) {
    auto* relocations = reinterpret_cast<const ElfW(Rela)*>(entry_of(library.dynamic, table));
    auto count = entry_of(library.dynamic, size) / sizeof(ElfW(Rela));
    for (size_t i = 0; relocations != nullptr && i < count; ++i) {
      const auto& symbol = symbols[ELF64_R_SYM(relocations[i].r_info)];
      if (symbol.st_name != 0 && std::strcmp(names + symbol.st_name, function) == 0) {
        return reinterpret_cast<void**>(library.base + relocations[i].r_offset);
      }
    }
  }
  return nullptr;
}

bool point(void** place, void* function) {
  auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  auto start = reinterpret_cast<uintptr_t>(place) & ~(page - 1);
  if (mprotect(reinterpret_cast<void*>(start), page, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(place, function, __ATOMIC_RELEASE);
  return true;
}

bool share_accelerator() {
  Library library{reinterpret_cast<const void*>(&at::accelerator::getAccelerator)};
  if (dl_iterate_phdr(find_library, &library) == 0 || library.dynamic == nullptr) return false;
  void** place = place_of(library, ASKED);
  return place != nullptr && point(place, reinterpret_cast<void*>(&registered_for_thread));
}

bool take_accelerator(bool ours) { return std::exchange(is_ours, ours); }
}  // namespace

void bind_accelerator(pybind11::module_& m) {
  m.def("share_accelerator", &share_accelerator, "Have torch decide by thread; false: it can't be had.");
  m.def("take_accelerator", &take_accelerator, "Whether it is lazygt in this thread; what it was before.");
}
}  // namespace lazygt
