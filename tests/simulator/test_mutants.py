"""Real parts with one deliberate fault each: the invariants must notice every one of them."""

import asyncio
from dataclasses import fields, replace
from functools import partial

import pytest

from roll_async.buffer.batch_choice import BatchChoice
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions, ReleaseReason
from roll_async.config.staleness import StalenessPolicy, due_step
from roll_async.inference.engine_host import EngineHost
from roll_async.pipelines.rlvr import TrainLoop
from roll_async.pipelines.validator import Validator
from roll_async.pipelines.wire import UserHooks
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.requests import PendingRequest
from roll_async.rollout.filters.filter_budget import BudgetOptions
from roll_async.rollout.filters.group_filter import GroupFilter
from roll_async.rollout.rollouter import Rollouter
from roll_async.simulator.lineage import CheckpointStore
from roll_async.simulator.parts.models import EngineFaults, ProcessModel, ToolModel
from roll_async.simulator.parts.text import STOP
from roll_async.simulator.scenario import random_branched_scenario, random_killed_scenario, random_scenario
from roll_async.simulator.world import FaultyParts, simulate
from roll_async.trainer.learner import Learner
from roll_async.weight_sync.push import ParameterSynchronizer

chat_scenario = partial(random_scenario, agents=False)
"""Broken sources of trajectories are in tests/unit/simulator/test_agent_worlds.py."""


class SlotFreeWhenTrained(MessageQueue):
    """Counts a weight push the moment the step is trained, before any engine holds the weights."""

    @property
    def admission_limit(self):
        return 0 if self._held is None else self._options.admission_limit(max(self._held, self._last_taken))


class SlotFreeWhenFinished(MessageQueue):
    """Forgets that finished groups hold their slots."""

    def _free_slots(self):
        held = self._book.occupying - len(self._book.buffered_ids)
        return max(0, self.admission_limit - held)


class OverdueFirst(BatchChoice):
    """Overdue groups first, else whatever is finished, youngest first; nobody looks ahead."""

    def batch(self, step, num_groups):
        ready = [self._book.entries[i] for i in self._book.buffered_ids]
        bound = self._options.bound_versions
        ready.sort(key=lambda e: (due_step(admitted_version=e.slot.admitted_version, max_versions=bound) > step,
                                  -e.slot.group_id))  # fmt: skip
        return ready[:num_groups] if len(ready) >= num_groups else None


class NoLookAhead(MessageQueue):
    def __init__(self, options, ledger):
        super().__init__(options, ledger)
        self._choice = OverdueFirst(options, self._book)


class BoundNotEnforced(MessageQueue):
    """Policy drop drops nothing."""

    def _drop_stale(self, step):
        pass


class TrainsWhatIsMaskedAltogether(MessageQueue):
    """Policy token_mask keeps groups of which no token is left."""

    def _drop_stale(self, step):
        if self._options.policy is not StalenessPolicy.TOKEN_MASK:
            super()._drop_stale(step)


class LooseOptions(QueueOptions):
    @property
    def bound_versions(self):
        return self.staleness_bound if self.max_versions is None else self.max_versions


class HeadStartsWhenSynchronous(MessageQueue):
    """Over-sampled groups of a synchronous run stay for the next step, as max_versions seems to allow."""

    def __init__(self, options, ledger):
        super().__init__(LooseOptions(**{f.name: getattr(options, f.name) for f in fields(options)}), ledger)


class DurableWhenTrained(MessageQueue):
    """Tells the ledger of finished groups only when the next step is done: a stop or an error loses them."""

    def __init__(self, options, ledger):
        super().__init__(options, ledger)
        self._later, self._finished = [], ledger.finished
        ledger.finished = lambda *group: self._later.append(group)

    async def step_trained(self, step):
        for group in self._later:
            self._finished(*group)
        self._later.clear()
        await super().step_trained(step)


class RequeuedPromptIsLost(MessageQueue):
    async def release(self, group_id, outcome, reason="", *, group=None):
        lost = ReleaseReason.FILTERED if outcome is ReleaseReason.REQUEUED else outcome
        await super().release(group_id, lost, reason, group=group)


class HalfGroup(MessageQueue):
    """Lets a group in before its last sample is there."""

    async def put(self, group):
        return await super().put(replace(group, samples=group.samples[:-1]))


class TakesGroupsTwice(MessageQueue):
    """Hands the first group of the batch before out once more."""

    before = ()

    async def take_batch(self, step, num_groups=None):
        groups = await super().take_batch(step, num_groups)
        again, self.before = [*self.before[:1], *groups[len(self.before[:1]) :]], groups
        return again


class LosesCount(MessageQueue):
    """An aborted group leaves the book without a trace."""

    async def release(self, group_id, outcome, reason="", *, group=None):
        entry = self._book.in_flight_entry(group_id)
        if entry is not None and outcome is ReleaseReason.REQUEUED:
            self._book.forget(entry)
            self._notify()
            return
        await super().release(group_id, outcome, reason, group=group)


class ForgetsTheLedger(MessageQueue):
    """Trained groups are not recorded with their step."""

    async def step_trained(self, step):
        record, self._ledger.trained = self._ledger.trained, lambda step, indexes: None
        try:
            await super().step_trained(step)
        finally:
            self._ledger.trained = record


class NothingIsReused(MessageQueue):
    """After a restart every finished group is generated again."""

    def _still_usable(self, group, step):
        return False


class FindsByNumber(CheckpointStore):
    """`latest` is the highest number in the folder, of whatever run."""

    def latest(self):
        return max(self.there, default=0)


class PrunesByNumber(CheckpointStore):
    """Keeps the highest numbers in the folder, of whatever run."""

    def prune(self):
        for step in sorted(self.there)[: -self.keep] if self.keep else ():
            del self.there[step]


class RestartsByNumber(CheckpointStore):
    """A run that has gone back leaves its later checkpoints, the highest numbers of a restart, where they are."""

    def go_back(self, step):
        pass


class AcceptsLateReplies(EnginePool):
    """Takes the reply of any attempt for the present one."""

    def _reply(self, link, completion):
        if completion.request_id not in link.in_flight:
            base = completion.request_id.partition("#")[0]
            for attempt in self._all_in_flight():
                if attempt.request.request.request_id == base:
                    link, completion = attempt.link, replace(completion, request_id=attempt.wire_id)
                    break
        super()._reply(link, completion)


class ContinuesFromTheStart(EnginePool):
    """Keeps the tokens of an interrupted request, and sends its prompt again without them."""

    def _begin(self, link):
        submit = link.client.submit

        async def stripped(requests):  # the first id of a prompt is its length
            await submit([replace(r, prompt_token_ids=r.prompt_token_ids[: r.prompt_token_ids[0]]) for r in requests])

        link.client.submit = stripped
        super()._begin(link)


class PausesTooEarly(EnginePool):
    """Says that the engines stand still before they do."""

    async def interrupt(self, mode, timeout_s):
        self._dispatching = False
        self._interrupt_mode = "abort" if mode == "abort" else "resume"


class DropsDeadRequests(EnginePool):
    """Requests of a lost replica are forgotten."""

    def _retry(self, pending: PendingRequest, link, reason):
        pass


class ForgetsProgress(EnginePool):
    """Does not listen to what running requests have generated."""

    def reported(self, link, report):
        super().reported(link, replace(report, progress=()))


class HasNoHeartbeat(EnginePool):
    """Neither asks who lives nor looks at progress: waits for requests to time out."""

    async def start(self):
        async def never():
            await asyncio.Event().wait()

        self._liveness._heartbeat = self._liveness._watch_tokens = never
        await super().start()


class LeavesSlotsFree(EnginePool):
    """Fills one slot at a time, with the next report the next one."""

    def _dispatch(self, pending, link, now_s):
        super()._dispatch(pending, link, now_s)
        self._choice.set(link.name, 0)


class LeavesAbortedOnesRunning(EnginePool):
    """Takes requests away from a suspect and from time-outs without ending them there."""

    async def start(self):
        async def nothing(link, attempts):
            pass

        self._liveness.end_on_replica = nothing
        await super().start()


class NeverLooksAtProgress(EnginePool):
    """A replica that computes nothing and answers every call keeps its requests until they time out."""

    async def start(self):
        async def never():
            await asyncio.Event().wait()

        self._liveness._watch_tokens = never
        await super().start()


class BelievesEveryReport(EnginePool):
    """Takes what is told of a running request for the next tokens, whatever was lost or came twice before."""

    def reported(self, link, report):
        for progress in report.progress:
            attempt = link.in_flight.get(progress.piece.request_id)
            start = len(attempt.received.token_ids) if attempt is not None and attempt.received is not None else 0
            told = replace(report, completions=(), failures=(), progress=(replace(progress, start=start),))
            super().reported(link, told)
        super().reported(link, replace(report, progress=()))


class BelievesEveryDigest(ParameterSynchronizer):
    async def _transfer(self, push, receivers):
        await super()._transfer(push, receivers)
        push.failed.clear()


class HeldBeforeCommitted(ParameterSynchronizer):
    """Tells the queue of new weights when the push begins."""

    async def push(self, version):
        self._weights_held(version)
        return await super().push(version)


class WaitsForEveryGroup(Rollouter):
    """A stop that waits for groups however long they are scored."""

    async def _cut_short(self):
        await asyncio.wait(self._unfinished().values())


class SwapsLogprobs(EnginePool):
    """Every log-prob beside the wrong token."""

    def _finish(self, pending, last, replica=""):
        super()._finish(pending, replace(last, logprobs=last.logprobs[::-1]), replica)


class LabelsByTheLastVersion(EnginePool):
    """One version for all tokens of a reply, the one it ended under."""

    def _reply(self, link, completion):
        runs = completion.version_runs
        labelled = ((runs[-1][0], len(completion.token_ids)),) if runs else ()
        super()._reply(link, replace(completion, version_runs=labelled))


class AbortsWithoutEnd(EnginePool):
    """Waits for the replies of aborted requests, however long they take."""

    async def abort(self, request_ids):
        wanted = set(request_ids)
        waits = [a.request.result for a in self._all_in_flight() if a.request.request.request_id in wanted]
        if waits:
            await asyncio.wait(waits)
        await super().abort(wanted)


class SurplusComesAgainAtOnce(MessageQueue):
    """The prompt of a surplus group is admitted again at the same instant."""

    def _requeue_prompt(self, entry):
        entry.surplus = False
        super()._requeue_prompt(entry)


class NeverUsesItsBudget(Rollouter):
    """Filters for ever."""

    async def _deliver(self, slot, outcome):
        self._budget = None
        await super()._deliver(slot, outcome)


class ValidatesWhatIsThere(TrainLoop):
    """Pushes every k steps, whatever is to be validated."""

    def _push_due(self, step):
        return step % self._plan.sync_every == 0


class WithValidator(TrainLoop):
    """With another schedule of its validations."""

    faulty: type[Validator]

    def __init__(self, parts, plan):
        super().__init__(parts, plan)
        self.validator = self.faulty(parts.validate, parts.rollouter, plan, self._until_validated)


class SkipsValidations(WithValidator):
    class faulty(Validator):
        async def begin(self, step, *, last):
            pass


class GeneratesOverValidations(Rollouter):
    """A validation that has set training aside shares the engines with it."""

    async def pause(self):
        pass


class ForgetsTheRestored(TrainLoop):
    """The validation of the restored step is left out."""

    async def _start(self):
        await self._push_to_all(self.trained)


class PushesOverValidations(WithValidator):
    class faulty(Validator):
        async def result(self, trained, *, wait, stoppable=True):
            return await super().result(trained, wait=False)


class MeasuresWithTheWrongWeights(WithValidator):
    """Replicas of a validation keep the weights that they were given first."""

    class faulty(Validator):
        async def claim(self, step):
            return bool(self.begun_until and self.running is None) or await super().claim(step)


class LeavesClaimedReplicas(TrainLoop):
    """A validation on its own replicas begins without the weights of its step: they resume where they can not."""

    async def _push_to_due(self, step, *, measures):
        return await super()._push_to_due(step, measures=False)


class ForgetsSkipped(WithValidator):
    """A due validation is left out and not counted."""

    class faulty(Validator):
        async def claim(self, step):
            return self.running is None and await super().claim(step)


class GivesNoWay(EnginePool):
    """A validation beside training keeps its slots."""

    def _make_room(self):
        pass


class LeavesTheStep(TrainLoop):
    """The step under way is not saved when another role has failed."""

    async def rescue(self):
        pass


class Rests(TrainLoop):
    """Does nothing for an hour after every step."""

    async def _step(self, step):
        await asyncio.sleep(3600.0)
        return await super()._step(step)


class BaselineOfASample(ChatCompletionScheduler):
    """The greedy answer is a sample like the others."""

    async def _with_retries(self, request):
        name = request.name
        return await super()._with_retries(replace(request, name=name.replace("greedy", "7")))


class TrainsToolTokens(ChatCompletionScheduler):
    def _judge(self, group, kept):
        samples = tuple(replace(s, loss_mask=b"\x01" * len(s.loss_mask)) for s in group.samples)
        return super()._judge(replace(group, samples=samples), kept)


class CutsStopStrings(EngineHost):
    """Hands over an unfinished answer as it is."""

    def _whole_text(self, part):
        return part


class ProximalForBehaviour(Learner):
    def _policy_rows(self, batch, proximal, reference, signal):
        rows, metrics = super()._policy_rows(batch, proximal, reference, signal)
        return replace(rows, behaviour_logprobs=proximal), metrics


class AStepOlder(Learner):
    def _policy_rows(self, batch, proximal, reference, signal):
        return super()._policy_rows(replace(batch, step=batch.step + 1), proximal, reference, signal)


class MasksNothing(Learner):
    def _loss_mask(self, batch):
        return batch.mask


class AdvantagesOfTheNextRow(Learner):
    def _signal(self, batch, *rest):
        signal = super()._signal(batch, *rest)
        return replace(signal, advantages=signal.advantages.roll(1, 0) * batch.mask)


class LeavesInAHurry(EnginePool):
    """Stops nothing on a replica that leaves."""

    async def _stop_running(self, attempts):
        pass


class ForgetsWhoLeaves(EnginePool):
    """What a replica had that left does not go on."""

    async def retire(self, name):
        if name in self._links:
            self._drop(self._links[name])


class LaterTurnsAboveTheCap(EnginePool):
    """Sends later turns to their replica at once, full or not, where the KV cache limits what it runs."""

    def __init__(self, clients, options):
        super().__init__(clients, options)
        self._sticky._strict = False


class KeepsASlotFree(EnginePool):
    """Sends one request less than the KV cache has room for."""

    def _set_free(self, link):
        super()._set_free(link)
        free = self._limit.slots(link) - len(link.in_flight)
        if self._limit.strict and not link.leaving and free > 0:
            self._choice.set(link.name, free - 1)


MUTANTS = {
    "sends later turns above the cap": (UserHooks(manager=LaterTurnsAboveTheCap), 10),
    "keeps a slot free": (UserHooks(manager=KeepsASlotFree), 10),
    "slot free when trained": (UserHooks(queue=SlotFreeWhenTrained), 1),
    "slot free when finished": (UserHooks(queue=SlotFreeWhenFinished), 1),
    "overdue first without look-ahead": (UserHooks(queue=NoLookAhead), 1),
    "bound not enforced": (UserHooks(queue=BoundNotEnforced), 1),
    "trains what is masked altogether": (UserHooks(queue=TrainsWhatIsMaskedAltogether), 1),
    "head starts when synchronous": (UserHooks(queue=HeadStartsWhenSynchronous), 4),
    "durable when trained": (UserHooks(queue=DurableWhenTrained), 9),
    "requeued prompt is lost": (UserHooks(queue=RequeuedPromptIsLost), 2),
    "half a group": (UserHooks(queue=HalfGroup), 3),
    "a group twice": (UserHooks(queue=TakesGroupsTwice), 3),
    "loses count": (UserHooks(queue=LosesCount), 2),
    "accepts late replies": (UserHooks(manager=AcceptsLateReplies), 5),
    "continues from the start": (UserHooks(manager=ContinuesFromTheStart), 5),
    "pauses too early": (UserHooks(manager=PausesTooEarly), 5),
    "drops requests of dead engines": (UserHooks(manager=DropsDeadRequests), 6),
    "forgets progress": (UserHooks(manager=ForgetsProgress), 6),
    "has no heartbeat": (UserHooks(manager=HasNoHeartbeat), 6),
    "believes every report": (UserHooks(manager=BelievesEveryReport), 5),
    "leaves slots free": (UserHooks(manager=LeavesSlotsFree), 10),
    "leaves aborted requests running": (UserHooks(manager=LeavesAbortedOnesRunning), 11),
    "never looks at progress": (UserHooks(manager=NeverLooksAtProgress), 6),
    "believes every digest": (UserHooks(synchronizer=BelievesEveryDigest), 7),
    "weights held before committed": (UserHooks(synchronizer=HeldBeforeCommitted), 1),
    "waits for every group": (UserHooks(rollouter=WaitsForEveryGroup), 9),
    "swaps log-probs": (UserHooks(manager=SwapsLogprobs), 13),
    "labels by the last version": (UserHooks(manager=LabelsByTheLastVersion), 7),
    "aborts without end": (UserHooks(manager=AbortsWithoutEnd), 11),
    "surplus comes again at once": (UserHooks(queue=SurplusComesAgainAtOnce), 16),
    "never uses its budget": (UserHooks(rollouter=NeverUsesItsBudget), 6),
    "validates what is there": (UserHooks(trainer=ValidatesWhatIsThere), 17),
    "skips validations": (UserHooks(trainer=SkipsValidations), 17),
    "generates over validations": (UserHooks(rollouter=GeneratesOverValidations), 17),
    "forgets the restored step": (UserHooks(trainer=ForgetsTheRestored), 17),
    "pushes over validations": (UserHooks(trainer=PushesOverValidations), 17),
    "measures with the wrong weights": (UserHooks(trainer=MeasuresWithTheWrongWeights), 17),
    # A replica refuses to run without whole weights, which is a fault of ours and ends the run.
    "leaves claimed replicas": (UserHooks(trainer=LeavesClaimedReplicas), 6),
    "forgets skipped validations": (UserHooks(trainer=ForgetsSkipped), 17),
    "gives no way": (UserHooks(manager=GivesNoWay), 10),
    "leaves the step": (UserHooks(trainer=LeavesTheStep), 9),
    "rests": (UserHooks(trainer=Rests), 18),
    "baseline of a sample": (FaultyParts(scheduler=BaselineOfASample), 13),
    "trains tool tokens": (FaultyParts(scheduler=TrainsToolTokens), 13),
    "cuts stop strings": (FaultyParts(host=CutsStopStrings), 5),
    "proximal for behaviour": (FaultyParts(learner=ProximalForBehaviour), 13),
    "a step older": (FaultyParts(learner=AStepOlder), 13),
    "masks nothing": (FaultyParts(learner=MasksNothing), 13),
    "advantages of the next row": (FaultyParts(learner=AdvantagesOfTheNextRow), 13),
    "leaves in a hurry": (UserHooks(manager=LeavesInAHurry), 21),
    "forgets who leaves": (UserHooks(manager=ForgetsWhoLeaves), 21),
}
"""Name to (parts, number of the invariant that notices)."""

KILLED_MUTANTS = {
    "forgets the ledger": (UserHooks(queue=ForgetsTheLedger), 8),
    "reuses nothing": (UserHooks(queue=NothingIsReused), 8),
}


def every_reply_twice(seed):
    """Two replicas that double and delay every reply, interrupted often."""
    base = chat_scenario(seed)
    return replace(
        base,
        engines=(EngineFaults(duplicate_share=1.0, delay_s=2.0),) * 2,
        sync=replace(base.sync, interrupt_mode="resume", interrupt_timeout_s=2.0),
        speed=replace(base.speed, token_s=0.5),
        train=replace(base.train, step_s=0.5, fails_at_step=None, hangs_at_step=None),
        queue=replace(base.queue, async_generation_ratio=2.0, trigger_parameter_sync_step=1, max_versions=None),
        plan=replace(base.plan, sync_every=1, max_steps=6),
    )


def long_answers_and_deaths(seed):
    """Answers of half a minute, and a replica that tells everything twice and dies in the middle of them."""
    base = chat_scenario(seed)
    return replace(
        base,
        engines=(EngineFaults(), EngineFaults(duplicate_share=1.0, crash_at_s=12.0 + seed % 15)),
        lengths=replace(base.lengths, mean_tokens=60.0, sigma=0.0),
        scheduler=replace(base.scheduler, sampling=replace(base.scheduler.sampling, max_new_tokens=60)),
        manager=replace(base.manager, generation_timeout_s=200.0),
        sync=replace(base.sync, interrupt_mode="resume"),
        speed=replace(base.speed, token_s=0.5, token_s_per_request=0.0),
        train=replace(base.train, fails_at_step=None),
        stop_at_s=None,
    )


def one_of_two_hangs(seed):
    """A core that computes nothing behind a front end that answers, with the time-outs of a config that names none."""
    base = long_answers_and_deaths(seed)
    return replace(
        base,
        engines=(EngineFaults(), EngineFaults(hung_from_s=3.0 + seed % 10)),
        train=replace(base.train, fails_at_step=None, hangs_at_step=None),
        manager=replace(base.manager, generation_timeout_s=3600.0, max_concurrent_per_server=30),
        queue=replace(base.queue, stall_timeout_s=1800.0),
        max_restarts=1,
    )


def by_value(seed):
    """The real learner, with a bound that masks tokens."""
    base = chat_scenario(seed)
    queue = replace(
        base.queue, policy=StalenessPolicy.TOKEN_MASK, max_versions=max(1, base.queue.trigger_parameter_sync_step - 1)
    )
    return replace(base, by_value=True, queue=queue, train=replace(base.train, fails_at_step=None, hangs_at_step=None))


def over_sampled(seed):
    """As many groups again as a batch has, of very different lengths, and no push while they are generated."""
    base = chat_scenario(seed)
    groups = base.queue.groups_per_batch
    return replace(
        base,
        engines=(EngineFaults(),) * 2,
        lengths=replace(base.lengths, mean_tokens=15.0, sigma=1.3, prompt_share=1.0),
        scheduler=replace(base.scheduler, sampling=replace(base.scheduler.sampling, max_new_tokens=60)),
        manager=replace(base.manager, interrupt_timeout_s=2.0, max_concurrent_per_server=30),
        speed=replace(base.speed, token_s=0.5),
        queue=replace(base.queue, oversample_groups=groups, policy=StalenessPolicy.WAIT, max_versions=None),
        sync=replace(base.sync, interrupt_mode="resume"),
        train=replace(base.train, step_s=20.0, jitter=0.0, fails_at_step=None, hangs_at_step=None),
        num_prompts=None,
        stop_at_s=None,
    )


def process_dies(seed):
    """The rollout process is killed between the third and the thirtieth second."""
    base = chat_scenario(seed)
    return replace(
        base,
        process=ProcessModel(way_s=0.05, dies_at_s=3.0 + seed % 28),
        train=replace(base.train, step_s=5.0, fails_at_step=None, hangs_at_step=None),
        stop_at_s=None,
    )


def shared_validations(seed):
    """Validations as long as a batch beside training, on few slots."""
    base = chat_scenario(seed)
    return replace(
        base,
        validation_mode="share",
        validation_engines=(),
        plan=replace(base.plan, validation_mode="share", eval_every=1 + seed % 3),
        validation_prompts=6,
        second_set=seed % 2 == 0,
        manager=replace(base.manager, max_concurrent_per_server=3),
        train=replace(base.train, fails_at_step=None, hangs_at_step=None),
        stop_at_s=None,
    )


def small_caches(seed):
    """Answers with calls of a tool on replicas whose KV cache is full of a few of them."""
    base = chat_scenario(seed)
    return replace(
        base,
        engines=(EngineFaults(),) * 2,
        tools=ToolModel(share=0.9, max_turns=4, seconds=1.0),
        manager=replace(base.manager, admission="kv", max_concurrent_per_server=1 + seed % 3),
        speed=replace(base.speed, kv_tokens=150, prefill_token_s=0.01 * base.speed.token_s),
        scheduler=replace(base.scheduler, sampling=replace(base.scheduler.sampling, stop_strings=())),
        train=replace(base.train, fails_at_step=None, hangs_at_step=None),
        stop_at_s=None,
    )


def validations_apart(seed):
    """Validations on replicas of their own that take longer than a step, between pushes and with them. Twenty times as
    slow, they may need more than half a minute for a token, and are not silent.
    """
    base = shared_validations(seed)
    return replace(
        base,
        validation_mode="replicas",
        manager=replace(base.manager, silence_s=600.0),
        plan=replace(base.plan, validation_mode="replicas", eval_every=1),
        validation_engines=(EngineFaults(slow_factor=20.0),) * (1 + seed % 2),
        max_restarts=0,
        scales=(),
    )


def hardly_any_spread(seed):
    """Nine of ten groups are filtered, and twice the groups of a batch is all there may be."""
    base = chat_scenario(seed)
    groups = base.queue.groups_per_batch
    return replace(
        base,
        scheduler=replace(base.scheduler, samples_per_group=2, filter=GroupFilter()),
        plan=replace(base.plan, samples_per_group=2),
        rewards=replace(base.rewards, flat_share=0.9),
        budget=BudgetOptions(groups_per_batch=groups, gen_batch_size=groups, max_num_gen_batches=2),
        train=replace(base.train, fails_at_step=None, hangs_at_step=None),
        num_prompts=None,
        stop_at_s=None,
    )


def stop_strings(seed):
    """Answers that end with a stop string, interrupted often."""
    base = every_reply_twice(seed)
    sampling = replace(base.scheduler.sampling, stop_strings=(STOP,), max_new_tokens=60)
    return replace(base, tools=None, scheduler=replace(base.scheduler, sampling=sampling), stop_at_s=None)


def replicas_leave(seed):
    """Four replicas with long answers, of which three leave, one after the other."""
    base = long_answers_and_deaths(seed)
    scales = tuple((4.0 + 5 * i + seed % 3, 3 - i) for i in range(3))
    return replace(base, engines=(EngineFaults(),) * 4, scales=scales)


WORLDS = {
    "sends later turns above the cap": small_caches,
    "keeps a slot free": small_caches,
    "leaves in a hurry": replicas_leave,
    "forgets who leaves": replicas_leave,
    "never uses its budget": hardly_any_spread,
    "proximal for behaviour": by_value,
    "a step older": by_value,
    "masks nothing": by_value,
    "advantages of the next row": by_value,
    "surplus comes again at once": over_sampled,
    "pushes over validations": shared_validations,
    "gives no way": shared_validations,
    "measures with the wrong weights": validations_apart,
    "leaves claimed replicas": validations_apart,
    "forgets skipped validations": validations_apart,
    "leaves the step": process_dies,
    "cuts stop strings": stop_strings,
    "aborts without end": over_sampled,
    "leaves aborted requests running": one_of_two_hangs,
    "never looks at progress": one_of_two_hangs,
    "accepts late replies": every_reply_twice,
    "forgets progress": long_answers_and_deaths,
    "believes every report": long_answers_and_deaths,
}


def test_every_fault_replaces_a_method_that_its_part_still_has():
    for name, (classes, _) in {**MUTANTS, **KILLED_MUTANTS}.items():
        for part in (getattr(classes, f.name) for f in fields(classes)):
            if not isinstance(part, type) or part.__module__ != __name__:
                continue
            mine = [cls for cls in part.__mro__ if cls.__module__ == __name__]
            theirs = [cls for cls in part.__mro__ if cls.__module__ != __name__]
            replaced = {n for cls in mine for n, v in vars(cls).items() if callable(v) or type(v) is property}
            assert [n for n in replaced - {"faulty"} if not any(hasattr(cls, n) for cls in theirs)] == [], name


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_part_is_noticed_by_the_invariant_it_breaks(name):
    classes, number = MUTANTS[name]
    make = WORLDS.get(name, chat_scenario)
    for seed in range(300):
        if isinstance(classes, FaultyParts):
            findings = simulate(make(seed), others=classes).findings
        else:
            findings = simulate(make(seed), classes).findings
        if any(f.startswith(f"invariant {number}:") for f in findings):
            return
    pytest.fail(f"300 schedules with a part that {name} passed every check")


@pytest.mark.parametrize("store", [FindsByNumber, PrunesByNumber, RestartsByNumber])
def test_a_number_in_the_place_of_a_lineage_is_noticed(store):
    for seed in range(40):
        findings = simulate(random_branched_scenario(seed, agents=False), others=FaultyParts(store=store)).findings
        if any(f.startswith("invariant 22:") for f in findings):
            return
    pytest.fail(f"40 runs that went back or shared a folder passed every check of {store.__name__}")


@pytest.mark.parametrize("name", KILLED_MUTANTS)
def test_a_broken_restart_is_noticed(name):
    classes, number = KILLED_MUTANTS[name]
    for seed in range(40):
        findings = simulate(random_killed_scenario(seed), classes).findings
        if any(f.startswith(f"invariant {number}:") for f in findings):
            return
    pytest.fail(f"40 killed runs with a queue that {name} passed every check")


@pytest.mark.parametrize(
    "world",
    [
        every_reply_twice,
        long_answers_and_deaths,
        one_of_two_hangs,
        by_value,
        over_sampled,
        small_caches,
        hardly_any_spread,
        process_dies,
        stop_strings,
        replicas_leave,
        shared_validations,
        validations_apart,
    ],
    ids=lambda world: world.__name__,
)
@pytest.mark.parametrize("seed", range(10))
def test_the_worlds_of_the_mutation_checks_are_sound_without_mutants(seed, world):
    assert simulate(world(seed)).findings == ()
