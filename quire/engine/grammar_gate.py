"""Requests wait for their grammars: the gate that admission asks, and what an engine core is given. No state."""

from __future__ import annotations

from quire.config import QuireConfig
from quire.scheduler.admission import AdmissionGate, Candidate, GateDecision
from quire.scheduler.step_plan import StepPlan
from quire.structured_output.compile.fast_budget import FastBudget
from quire.structured_output.compile.messages import WorkerSetup
from quire.structured_output.compile.pool import CompilePool
from quire.structured_output.manager import GrammarManager, no_pool


def make_grammars(config: QuireConfig) -> GrammarManager:
    """The grammars of an engine core; nothing is loaded or started before a request needs one."""
    if config.model.skip_tokenizer_init:
        return GrammarManager(no_pool)
    assert config.arch is not None, "resolve() sets the architecture"
    vocab_size, budget = config.arch.vocab_size, config.structured_outputs
    path = config.model.tokenizer if config.model.tokenizer not in (None, config.model.model) else config.model_path

    def make_pool(eos_token_id: int) -> CompilePool:
        setup = WorkerSetup(str(path), vocab_size, eos_token_id, budget.compile_timeout_s, budget.compile_memory_bytes)
        return CompilePool(setup, FastBudget() if config.scheduler.scheduling_policy == "fair" else None)

    return GrammarManager(make_pool)


def grammar_gate(grammars: GrammarManager, other: AdmissionGate) -> AdmissionGate:
    """A request is passed over, and delays no other, until its grammar is made; and then `other` is asked."""

    def gate(candidate: Candidate, plan: StepPlan) -> GateDecision:
        return other(candidate, plan) if grammars.is_ready(candidate.request.handle) else GateDecision.SKIP

    return gate
