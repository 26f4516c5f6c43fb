"""The generator suite's checks of links, which send weights without passing through the driver."""

from __future__ import annotations

from typing import Any

import torch
from rlhf.interfaces.model import ModelSpec
from rlhf.types import RoleSpec, Sampling

from rlhf_testing.contract import expect
from rlhf_testing.plain import PlainTrainer

_SECONDS = 60.0
_BUCKET_BYTES = 2**14


class LinkChecks:
    """A mixin of :class:`rlhf_testing.generator.GeneratorContract`, which defines the methods declared here."""

    make: Any
    grid: Any
    about: Any
    path: Any
    _same_logprobs: Any

    def test_links(self) -> None:
        """With the capability ``accept:links``, weights that come over a link are proven and sampled from, and a second
        link replaces the first. The check uses CPUs, shared memory and one configuration, because GPU memory cannot be
        shared within one process, and a link does not depend on options."""
        from rlhf_workers.links.coordination import serve
        from rlhf_workers.links.ends import ConnectedTrainer
        from rlhf_workers.links.link import Link
        from rlhf_workers.links.receiving import ReceivesOverLinks, receives_over_links

        config = next(iter(self.grid()))
        about, s = self.about(config), self.make(config)
        generator = s.generator
        if not receives_over_links(type(generator)) or torch.cuda.is_available():
            return
        expect(
            isinstance(generator, ReceivesOverLinks),
            f"{about} has the capability accept:links and is no rlhf_workers.links.receiving.ReceivesOverLinks",
        )
        stores = []  # kept alive: a store serves until it is collected, and an unread link must time out
        for version in (1, 2):
            other = PlainTrainer(None, ModelSpec(RoleSpec("policy"), str(self.path(seed=4 + version))))
            s.source.load_weights(other.weights())
            store, address = serve("127.0.0.1", _SECONDS)
            stores.append(store)
            link = Link("shared", address, generator.receivers(), 1, False, _SECONDS)
            trainer = ConnectedTrainer(s.source, link)
            generator.connect(link, 0)
            generator.begin_load(version)
            for header in trainer.send_buckets("live", _BUCKET_BYTES):
                generator.take(header)
            for proof in generator.end_load():
                expect(
                    proof.version == version and dict(proof.received) == s.source.sent(),
                    f"{about} version {version} came over a link; {proof.who} proves version {proof.version} and "
                    f"{len(proof.received)} tensors, {len(s.source.sent())} were sent: fingerprints must be equal",
                )
            self._same_logprobs(s, Sampling(8, ignore_eos=True), f"{about} after weights came over a link:")
            stale = [name for header in trainer.send_buckets("live", _BUCKET_BYTES) for name in generator.stale(header)]
            expect(not stale, f"{about} stale() names {stale} of the weights that it samples from")
            trainer.close()
