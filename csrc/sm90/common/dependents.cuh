// A kernel that starts while the one before it ends: launch_after.
#pragma once

namespace flash_csa::sm90 {

// The following kernel's blocks may start where there is room. It sees nothing of ours before we
// end, so this may come first.
__device__ __forceinline__ void allow_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits for the kernel before to end, and sees what it wrote.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flash_csa::sm90
