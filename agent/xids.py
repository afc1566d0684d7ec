"""NVIDIA's XIDs as one table: what kind of error a code is, and what to do about it.

Facts are those of NVIDIA's XID catalogue as of October 2025, https://docs.nvidia.com/deploy/xid-errors/: its immediate
resolution became a word of `agent.vocabulary.ACTIONS`. Where the catalogue names a workflow, the action is its most
common outcome, or `look` where the line in the kernel log has to be read. The names are ours.

The kind keeps what a program did to itself apart from broken hardware:

- `application`: the work of one program was ended; nobody but its owner has to act. 45 is the clean-up after another
  XID or after a program that was killed.
- `hardware`: the GPU, its firmware or its links need a reset or a look, whoever uses it.
- `info`: the driver says something; nothing is broken by it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from agent.errors import UsageError
from agent.vocabulary import ACTIONS

KINDS: Final = ("hardware", "application", "info")


class XidMeaning(NamedTuple):
    """What one XID says."""

    code: int
    kind: str  # one of KINDS
    action: str  # one of vocabulary.ACTIONS
    name: str

    @property
    def is_critical(self) -> bool:
        """Return whether the GPU cannot be relied upon until the action is taken."""
        return self.kind == "hardware" and (self.action in _DRASTIC or self.code in _CRITICAL_WORKFLOWS)


#: Actions that take the GPU from its work.
_DRASTIC: Final = frozenset({"reset_gpu", "reboot_node", "replace_hardware"})
#: Hardware errors whose workflow may end without a reset, and which have to be acted upon all the same.
_CRITICAL_WORKFLOWS: Final = frozenset({48, 74})


def _engines(kind: str, action: str, name: str, codes: Iterable[int]) -> list[XidMeaning]:
    """Return one row for each engine of a sort."""
    return [XidMeaning(code, kind, action, name) for code in codes]


_ROWS: Final = (
    # What a program did, or what happened to one program.
    XidMeaning(8, "application", "restart_app", "channel timed out"),
    XidMeaning(11, "application", "restart_app", "invalid command stream"),
    XidMeaning(13, "application", "restart_app", "exception in a compute or graphics engine"),
    XidMeaning(25, "application", "restart_app", "illegal command stream"),
    XidMeaning(31, "application", "restart_app", "page fault in GPU memory"),
    XidMeaning(32, "application", "restart_app", "corrupt command stream"),
    *_engines("application", "restart_app", "exception in a copy engine", (39, 40, 41, 70, 71, 72, 75, 76, 77, 85)),
    *_engines("application", "restart_app", "exception in a copy engine", range(126, 136)),
    XidMeaning(43, "application", "none", "channel of a program was reset"),
    XidMeaning(44, "application", "none", "fault while switching between programs"),
    XidMeaning(45, "application", "none", "clean-up after another XID or a killed program"),
    *_engines("application", "restart_app", "exception in a video or security engine", (60,)),
    *_engines("application", "restart_app", "exception in a video decoder", (68, 83, 84, 88, 89, 96, 97, 98)),
    *_engines("application", "restart_app", "exception in a JPEG engine", (82, 99, 100, 101, 102, 103, 104, 105)),
    *_engines("application", "restart_app", "exception in an optical flow engine", (86, 139)),
    XidMeaning(69, "application", "restart_app", "illegal call of an engine"),
    XidMeaning(80, "application", "restart_app", "corrupt data sent to the GPU"),
    XidMeaning(141, "application", "none", "error in a fast path of CUDA"),
    # Hardware, its firmware and its links.
    XidMeaning(46, "hardware", "reset_gpu", "GPU stopped processing"),
    XidMeaning(48, "hardware", "reset_gpu", "uncorrectable memory error"),
    XidMeaning(54, "hardware", "look", "auxiliary power is not connected"),
    XidMeaning(61, "hardware", "look", "breakpoint of an internal microcontroller"),
    XidMeaning(62, "hardware", "reset_gpu", "internal microcontroller halted"),
    XidMeaning(64, "hardware", "reset_gpu", "row remapping failed"),
    XidMeaning(74, "hardware", "look", "NVLink error"),
    XidMeaning(79, "hardware", "reboot_node", "GPU fell off the bus"),
    XidMeaning(92, "hardware", "look", "high rate of corrected memory errors"),
    XidMeaning(94, "hardware", "restart_app", "contained memory error"),
    XidMeaning(95, "hardware", "reset_gpu", "uncontained memory error"),
    XidMeaning(109, "hardware", "reset_gpu", "switch between programs timed out"),
    XidMeaning(110, "hardware", "reset_gpu", "security fault"),
    XidMeaning(119, "hardware", "reset_gpu", "firmware (GSP) does not answer"),
    XidMeaning(120, "hardware", "reset_gpu", "firmware (GSP) failed"),
    XidMeaning(121, "hardware", "look", "error on the link between CPU and GPU"),
    XidMeaning(136, "hardware", "reset_gpu", "NVLink training failed"),
    XidMeaning(140, "hardware", "reset_gpu", "uncorrectable memory error escaped"),
    XidMeaning(142, "application", "look", "exception in a video encoder"),
    XidMeaning(143, "hardware", "reset_gpu", "GPU could not be initialised"),
    *_engines("hardware", "look", "NVLink 5 error, see the line in the kernel log", range(144, 151)),
    XidMeaning(151, "info", "reboot_node", "rotation of keys failed (confidential computing)"),
    XidMeaning(155, "hardware", "reset_gpu", "NVLink error found by software"),
    XidMeaning(156, "hardware", "reset_gpu", "a part of the GPU was retired"),
    XidMeaning(157, "hardware", "look", "a part of the GPU could not be retired"),
    XidMeaning(158, "hardware", "reset_gpu", "GPU timed out for good"),
    XidMeaning(164, "hardware", "look", "power smoothing is near the end of its life"),
    XidMeaning(165, "hardware", "look", "power smoothing is at the end of its life"),
    XidMeaning(167, "hardware", "look", "PCIe timed out for good"),
    XidMeaning(168, "hardware", "look", "errors in protected memory, less memory is left"),
    XidMeaning(169, "hardware", "look", "security microcontroller halted"),
    XidMeaning(171, "hardware", "look", "detail of XID 48: in DRAM"),
    XidMeaning(172, "hardware", "look", "detail of XID 48: in SRAM"),
    # What the driver says in passing.
    *_engines("info", "none", "firmware says that a driver call failed", (37, 38, 66, 67)),
    XidMeaning(63, "info", "none", "a row was remapped or a page retired"),
    XidMeaning(78, "info", "look", "a vGPU did not start"),
    XidMeaning(93, "info", "none", "wear limit of the board's configuration memory"),
    *_engines("info", "none", "test message", (106, 107)),
    XidMeaning(137, "info", "none", "NVLink access without privilege, often that of a peer GPU"),
    *_engines("info", "none", "error in an inference engine of an SoC", (152, 153)),
    XidMeaning(154, "info", "look", "recovery action changed, see warpwatch_gpu_recovery_action"),
    XidMeaning(159, "info", "look", "error on the coherent bus, see unified memory"),
    *_engines("info", "none", "a channel was retired", (160, 161)),
    *_engines("info", "none", "power smoothing was switched", (162, 163)),
    *_engines("info", "look", "confidential computing over NVLink", (166, 170)),
)


class XidCatalogue:
    """The table with a site's changes; a code that it does not hold is unknown and asks for a look."""

    def __init__(self, actions: Mapping[int, str] | None = None, kinds: Mapping[int, str] | None = None) -> None:
        """Take changes of action and kind by code; raises UsageError at a word that is none of ours."""
        self._rows = {row.code: row for row in _ROWS}
        for code, action in (actions or {}).items():
            self._rows[code] = self[code]._replace(action=_word(code, action, ACTIONS, "action"))
        for code, kind in (kinds or {}).items():
            self._rows[code] = self[code]._replace(kind=_word(code, kind, KINDS, "kind"))

    def __getitem__(self, code: int) -> XidMeaning:
        """Return what `code` says."""
        return self._rows.get(code) or XidMeaning(code, "info", "look", "unknown")

    def rows(self) -> tuple[XidMeaning, ...]:
        """Return all rows by code."""
        return tuple(sorted(self._rows.values()))

    def critical(self) -> tuple[int, ...]:
        """Return the codes that are counted from 0 on, for `increase()` misses the first event of a new series."""
        return tuple(row.code for row in self.rows() if row.is_critical)


def _word(code: int, word: str, words: tuple[str, ...], what: str) -> str:
    if word not in words:
        raise UsageError(f"XID {code}: {word!r} is no {what}; use one of {', '.join(words)}")
    return word


#: NVIDIA's catalogue without changes.
XIDS: Final = XidCatalogue()
