"""Whether a group server is in the mesh: it has all that is passed on, or is away, or enters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.errors import UsageError
from paceline.interfaces.server_messages import Manifest, Standing
from paceline.parameter_server.groups.consistent_cut import Meetings
from paceline.parameter_server.groups.entering import Entering
from paceline.parameter_server.groups.local_server import Home
from paceline.parameter_server.groups.message_queue import Mail, Peer
from paceline.parameter_server.groups.outgoing import Telling
from paceline.parameter_server.groups.state_transfer import HAS_ALL, Captured, Part
from paceline.parameter_server.groups.update_log import Passing


class Membership:
    """Where this server stands. *entered* is called when it has taken everything from another
    one, *gone* when it is away, *mistaken* where copies do not fit; *agree*: see `Meetings`."""

    def __init__(
        self,
        home: Home,
        peers: Mapping[int, Peer],
        mail: Mail,
        passing: Passing,
        telling: Telling,
        agree: bool,
        entered: Callable[[], None],
        gone: Callable[[], None],
        mistaken: Callable[[str], None],
    ) -> None:
        self._home, self._peers = home, peers
        self._passing, self._telling = passing, telling
        self._tell_entered, self._tell_gone = entered, gone
        self.is_active, self._is_going = True, False
        """Whether it takes what is passed on; and has told that it will not."""
        self.entering = Entering(
            *(home.number, home, peers, mail, passing),
            entered=self._has_entered,
            mistaken=mistaken,
        )
        self.meetings = Meetings(
            *(home, peers, mail, passing),
            drain=self._pass_on_everything,
            capture=self._capture,
            agree=agree,
        )
        self._copies: dict[int, Captured] = {}
        """By server that takes one."""
        self.now = 0.0

    # ---- where it stands ----

    @property
    def is_in(self) -> bool:
        """Whether it has all that is passed on, and passes on what it applies."""
        enters = self.entering.is_under_way
        return self.is_active and not self._is_going and not enters

    def stands(self) -> Standing:
        """What others are told."""
        return Standing(
            life=self._passing.life,
            number=self._passing.next,
            entry=self.entering.entry,
            active=self.is_in,
            progress=self._home.progress,
            meeting=self.meetings.ended,
        )

    def is_taken_over(self, key: int, peer: Peer) -> Manifest:
        """*peer* takes everything from this server."""
        if self._home.is_loaded:
            return self._capture(key, {peer.number: peer})
        line = *self._passing.line, self._passing.next
        taken = [*self._passing.taken.saved(), line]
        return Manifest(active=self.is_in, meeting=self.meetings.ended, taken=taken)

    def part_of_copy(self, peer: Peer, key: int, part: int) -> Part | None:
        """What *peer* is to have of the copy with that *key*; None where it has all. Raises
        `UsageError` where there is no such copy."""
        captured = self._copies.get(peer.number)
        if captured is None or captured.key != key:
            raise UsageError(f"copy: there is none of number {key}")
        if part == HAS_ALL:
            del self._copies[peer.number]
            return None
        return captured.part(part)

    def lives_anew(self, peer: Peer) -> None:
        """A peer was started again."""
        self._copies.pop(peer.number, None)
        self.entering.lives_anew(peer)
        self.meetings.lives_anew(peer)

    def _capture(self, key: int, peers: Mapping[int, Peer]) -> Manifest:
        """Keep what this server has, for these to take over. Whatever it has applied was passed
        on before."""
        self._pass_on_everything()
        captured = Captured(
            *(key, self._home, self._passing, self.meetings.ended), active=self.is_in
        )
        self._copies.update(dict.fromkeys(peers, captured))
        return captured.manifest

    # ---- what it does ----

    def tell(self) -> bool:
        """Whether something was to be passed on by now."""
        self._telling.introduce()
        if not self.is_in or self.meetings.is_still or not self._home.is_loaded:
            return False
        return self._telling.tell(self.meetings.ended, self.now)

    def _pass_on_everything(self) -> bool:
        return self.is_in and self._telling.pass_on(True, self.meetings.ended, self.now)

    def meet(self) -> bool:
        """Whether a meeting goes on."""
        before = self.meetings.ended, self.meetings.is_still
        self.meetings.look()
        if not self.entering.is_under_way:
            self.meetings.answer()
        return before != (self.meetings.ended, self.meetings.is_still)

    def go(self, wanted: bool) -> bool:
        """Whether this server, whose group has no workers, goes on its way out of the mesh.
        *wanted*: somebody has asked it something."""
        if self._is_going:
            if not self._passing.all_answered():
                return False
            self.is_active = self._is_going = False
            self.entering.has_gone()
            self._tell_gone()
        elif wanted or not self._may_go():
            return False
        elif not self._pass_on_everything():
            self._telling.go(self.meetings.ended)
            self._is_going = True
        return True

    def _may_go(self) -> bool:
        """The others go on without it, and server 0, which stays, has whatever this one had. Where
        who dies comes back, server 1 stays, too: one of the two may die, and nothing is lost."""
        home = self._home
        stays = 2 if home.shard.members.return_from_loss else 1
        if home.number < stays or not self.is_in or self.meetings.is_still:
            return False
        zero = self._peers[0]
        has_all = zero.active and zero.lost is None and not zero.items()
        return has_all and home.is_loaded and not home.has_workers()

    def _has_entered(self, meeting: int) -> None:
        self.is_active, self._is_going = True, False
        self.meetings.has_entered(meeting)
        self._tell_entered()
