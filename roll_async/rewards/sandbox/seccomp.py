"""A seccomp filter that takes away what generated code must not do, without any privilege and without a library.

Most calls stay allowed; what is refused answers EPERM, so that the program sees an ordinary PermissionError. Numbers
are those of the kernel's tables for x86_64 and for the generic ABI (aarch64).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_REFUSED: dict[str, tuple[int, int]] = {
    # network (socketpair stays: asyncio needs one)
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200),
    "listen": (50, 201), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other programs and other processes
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "setsid": (112, 157), "setpgid": (109, 154),
    "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # signals that carry no target we could check
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    # memory that RLIMIT_AS does not count and that outlives the process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # owners, modes and times of files: Landlock does not cover them
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "file_setattr": (469, 469),
    # the machine
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "reboot": (169, 142), "init_module": (175, 105),
    "delete_module": (176, 106), "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, -1),
    "ioperm": (173, -1), "syslog": (103, 116), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
_CLONE, _CLONE3, _KILL, _TGKILL = (56, 220), (435, 435), (62, 129), (234, 131)
_PRCTL, _PRLIMIT64, _FCNTL, _IOCTL = (157, 167), (302, 261), (72, 25), (16, 29)
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data; the low word of an argument comes first
_CLONE_THREAD = 0x00010000
_PR_SET_PDEATHSIG = 1
_FORBIDDEN_FCNTL = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a file that sends signals to another process
_FORBIDDEN_IOCTL = (0x5412, 0x8901, 0x8902)  # TIOCSTI, FIOSETOWN, SIOCSPGRP

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def supported() -> bool:
    """Whether the table of this processor is known."""
    return platform.machine() in _AUDIT_ARCH


def install(*, own_pid: int) -> None:
    """Filter this process from now on, for good, threads started later included. Raises OSError when the kernel
    refuses. Signals reach `own_pid` and its group only; no process, only threads, can be started.
    """
    column = list(_AUDIT_ARCH).index(platform.machine())
    program = b"".join(_program(column, own_pid))

    class Fprog(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        # 8 bytes an instruction.
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(Fprog(len(program) // 8, program)), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl: {os.strerror(number)}")


def _program(column: int, own_pid: int) -> list[bytes]:
    """Classic BPF; every test jumps over the one instruction behind it, so no offset can grow too large."""
    arch = list(_AUDIT_ARCH.values())[column]
    # Of another architecture the same numbers are other calls.
    code = [_op(_LOAD, _ARCH), _op(_JEQ, arch, 1, 0), _op(_RET, _KILL_PROCESS), _op(_LOAD, _NUMBER)]
    # x32 has the architecture of x86_64, and other numbers behind this bit.
    if column == 0:
        code += [_op(_JGE, _X32_BIT, 0, 1), _op(_RET, _ERRNO | _EPERM)]
    for numbers in _REFUSED.values():
        if numbers[column] >= 0:
            code += [_op(_JEQ, numbers[column], 0, 1), _op(_RET, _ERRNO | _EPERM)]
    # glibc falls back from clone3, whose flags a filter cannot read, to clone.
    code += [_op(_JEQ, _CLONE3[column], 0, 1), _op(_RET, _ERRNO | _ENOSYS)]
    refuse, allow = _op(_RET, _ERRNO | _EPERM), _op(_RET, _ALLOW)
    code += _when(_CLONE[column], [_op(_LOAD, _ARG0), _op(_JSET, _CLONE_THREAD, 1, 0), refuse, allow])
    for number in (_KILL[column], _TGKILL[column]):
        # Target 0 is the own group.
        target = [_op(_LOAD, _ARG0), _op(_JEQ, own_pid, 2, 0), _op(_JEQ, 0, 1, 0), refuse, allow]
        code += _when(number, target)
    # A program could switch off that it ends with its host.
    code += _when(_PRCTL[column], _unless(_ARG0, (_PR_SET_PDEATHSIG,)))
    # 0 is the process itself; limits of others stay out of reach.
    code += _when(_PRLIMIT64[column], [_op(_LOAD, _ARG0), _op(_JEQ, 0, 1, 0), refuse, allow])
    code += _when(_FCNTL[column], _unless(_ARG1, _FORBIDDEN_FCNTL))
    code += _when(_IOCTL[column], _unless(_ARG1, _FORBIDDEN_IOCTL))
    return [*code, allow]


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """`body` (which always returns) for one system call."""
    return [_op(_JEQ, number, 0, len(body)), *body]


def _unless(argument: int, forbidden: tuple[int, ...]) -> list[bytes]:
    tests = [op for value in forbidden for op in (_op(_JEQ, value, 0, 1), _op(_RET, _ERRNO | _EPERM))]
    return [_op(_LOAD, argument), *tests, _op(_RET, _ALLOW)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value & 0xFFFFFFFF)
