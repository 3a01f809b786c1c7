"""LLM: offline generation in the caller's process.

Called by users and the command line. Owns an `LLMEngine` and the names of the requests it has enqueued.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from quire.config import QuireConfig
from quire.config.build import build_config
from quire.core.beam_search import BeamSearchOutput, BeamSearchParams
from quire.core.inputs import TextPrompt, TokensPrompt, made_by_template
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.core.tenancy import NOBODY, TenantShare
from quire.engine.beam_search import request_params, search_output
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.interrupts import DeferredInterrupt
from quire.entrypoints.progress import Progress
from quire.errors import ChatTemplateError, UnsupportedError, ValidationError, require_unset
from quire.logger import configure_logging, get_logger
from quire.tokenization.chat_template import ChatTemplate, load_chat_template
from quire.tokenization.tokenizer import Tokenizer
from quire.utils.checks import check_int

Prompt = str | list[int] | Mapping[str, Any] | TextPrompt | TokensPrompt
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]
Tenants = TenantShare | Sequence[TenantShare] | None


class LLM:
    """A model, ready to answer many prompts at once.

    Args:
        model: "leaf" (embedded), a directory in Hugging Face format, or a hub id.
        tokenizer: directory or hub id of another tokenizer.
        dtype: type of weights and activations; "auto" is the checkpoint's, where the device computes it.
        chat_template: a path, or Jinja itself, in place of the model's.
        seed: of the engine; requests without a seed of their own derive theirs from it.
        logits_processors: custom processors, classes or "module:Class".
        settings: any other setting by name, as listed in docs/reference/settings.md.

    Raises:
        QuireError: the settings, the model directory or the machine does not allow it.
    """

    def __init__(
        self,
        model: str = "leaf",
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        chat_template: str | None = None,
        seed: int = 0,
        logits_processors: Sequence[Any] | None = None,
        **settings: Any,
    ) -> None:
        config = build_config(
            model=model, tokenizer=tokenizer, dtype=dtype, chat_template=chat_template, seed=seed, **settings
        )
        _configure_logging_once(config)
        self._attach(LLMEngine.from_config(config, logits_processors=logits_processors or ()))

    @classmethod
    def from_engine_args(cls, engine_args: QuireConfig | Mapping[str, Any]) -> LLM:
        """An LLM from a whole configuration, or from settings by name."""
        _configure_logging_once()
        return cls.from_engine(LLMEngine.from_engine_args(engine_args))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> LLM:
        """An LLM over an engine that was made elsewhere."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self._names = itertools.count()
        self._enqueued: list[str] = []
        self._finished: dict[str, RequestOutput] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tenant: Tenants = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one batch as far as they fit.

        Args:
            prompts: one or many: texts, lists of token ids, {"prompt": ...}, {"prompt_token_ids": ...}.
            sampling_params: for all, or one for each; default: the model's own (`get_default_sampling_params`).
            use_tqdm: show a progress bar when the work takes long and stderr is a terminal.
            priority: one for each prompt; lower runs first, where the scheduling policy looks at it.
            tokenization_kwargs: only "add_special_tokens" is known.
            tenant: of all prompts, or one for each: whose they are, where the scheduling policy is "fair".
            lora_request, mm_processor_kwargs: refused; not supported yet.

        Returns:
            One output for each prompt, in the order of the prompts.

        Raises:
            ValidationError: a prompt or parameter is wrong; nothing stays queued.
            EngineDeadError: the engine stopped.
        """
        require_unset(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        names = self._submit(_prompt_list(prompts), sampling_params, priority, tokenization_kwargs, tenant)
        return self._run(names, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists.
            chat_template: in place of the model's: a path, or Jinja itself.
            chat_template_content_format: "string", "openai" (contents as parts) or "auto".
            add_generation_prompt: end the prompt with what begins the model's turn.
            continue_final_message: let the model continue the last message.
            tools: function descriptions for the template.
            chat_template_kwargs: further variables of the template.

        Other arguments, the return value and the errors are those of `generate`.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        require_unset(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        template = self._template(chat_template, with_tools=bool(tools))
        prompts = [
            made_by_template(
                template.render(
                    conversation,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    content_format=chat_template_content_format,
                    template_kwargs=chat_template_kwargs,
                ),
                template.id,
            )
            for conversation in _conversation_list(messages)
        ]
        # The template writes BOS and every other special token itself.
        tokenization = {"add_special_tokens": False, **(tokenization_kwargs or {})}
        return self._run(self._submit(prompts, sampling_params, priority, tokenization), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences after each prompt, found with `params.beam_width` beams.

        Args:
            concurrency_limit: most prompts at once; None = as many as fit.

        Other arguments, the order of what is returned and the errors are those of `generate`.
        """
        require_unset(lora_request=lora_request)
        one, items = request_params(params), _prompt_list(prompts)
        size = len(items) if concurrency_limit is None else check_int("concurrency_limit", concurrency_limit, 1)
        priorities = _one_each("priority", priority, len(items), lambda: 0)
        found: list[BeamSearchOutput] = []
        for start in range(0, len(items), max(1, size)):
            part = slice(start, start + size)
            outputs = self._run(self._submit(items[part], one, priorities[part], None), use_tqdm)
            found += [search_output(output, params, self.llm_engine.tokenizer) for output in outputs]
        return found

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        tenant: Tenants = None,
    ) -> list[str]:
        """Submit prompts without waiting; returns their request ids. Arguments and errors as `generate`."""
        names = self._submit(_prompt_list(prompts), sampling_params, priority, tokenization_kwargs, tenant)
        self._enqueued.extend(names)
        return names

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Run everything that was enqueued; its outputs in the order in which it was."""
        names, self._enqueued = self._enqueued, []
        return self._run(names, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ValidationError: the engine runs with skip_tokenizer_init.
        """
        if self.llm_engine.tokenizer is None:
            raise ValidationError(
                "this engine has no tokenizer: it runs with skip_tokenizer_init",
                hint="make it without skip_tokenizer_init",
                field="skip_tokenizer_init",
            )
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the model's own, see `generation_config`."""
        return self.llm_engine.defaults.sampling_params()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached pages; False, and nothing done, while any page is in use.

        Args:
            reset_running_requests: running requests give up their pages and compute them again, so none is in use.
        """
        require_unset(reset_connector=reset_connector)
        return self.llm_engine.reset_prefix_cache(reset_running_requests)

    def shutdown(self) -> None:
        """Release the model and its memory; harmless when repeated."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _submit(
        self,
        prompts: Sequence[Any],
        sampling_params: Params,
        priority: Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        tenant: Tenants = None,
    ) -> list[str]:
        """Add all prompts or, when one is refused, none."""
        params = self._params_for(sampling_params, len(prompts))
        priorities = _one_each("priority", priority, len(prompts), lambda: 0)
        tenants = _tenants(tenant, len(prompts))
        add_special_tokens = _add_special_tokens(tokenization_kwargs)
        names: list[str] = []
        try:
            for prompt, one, rank, share in zip(prompts, params, priorities, tenants, strict=True):
                names.append(str(next(self._names)))
                self.llm_engine.add_request(
                    names[-1], prompt, one, priority=rank, add_special_tokens=add_special_tokens, tenant=share
                )
        except BaseException:
            self.llm_engine.discard_requests(names)
            raise
        return names

    def _run(self, names: list[str], use_tqdm: bool) -> list[RequestOutput]:
        """Step until `names` are finished; when that fails, or is interrupted, none of them stays behind."""
        awaited = {*names, *self._enqueued}
        unfinished = set(names) - self._finished.keys()
        try:
            with Progress(len(names), is_enabled=use_tqdm) as progress, DeferredInterrupt() as interrupt:
                while unfinished:
                    interrupt.raise_if_pending()
                    assert self.llm_engine.has_unfinished_requests(), "every request ends with a final output"
                    for output in self.llm_engine.step():
                        if output.finished and output.request_id in awaited:
                            self._finished[output.request_id] = output
                            unfinished.discard(output.request_id)
                            progress.add(len(output.prompt_token_ids), output.metrics.num_generation_tokens)
                    progress.tick()
        except BaseException:
            self.llm_engine.discard_requests(names)
            for name in names:
                self._finished.pop(name, None)
            raise
        return [self._finished.pop(name) for name in names]

    def _params_for(self, given: Params, count: int) -> list[SamplingParams]:
        """One for each prompt, of which only the final output is of interest."""
        if given is None or isinstance(given, SamplingParams):
            return [_final_only(given or self.get_default_sampling_params())] * count
        return [_final_only(one) for one in _one_each("sampling_params", given, count, SamplingParams)]

    def _template(self, chat_template: str | None, *, with_tools: bool) -> ChatTemplate:
        template = self.llm_engine.chat_template
        chosen = chat_template or self.llm_engine.config.model.chat_template
        if chat_template is not None or (with_tools and chosen is None):
            template = load_chat_template(self.get_tokenizer(), chat_template, with_tools=with_tools)
        if template is None:
            raise ChatTemplateError(
                "this model has no chat template",
                hint="pass one (chat_template=...), or use generate() with a prompt of your own",
                field="chat_template",
            )
        return template


def _configure_logging_once(config: QuireConfig | None = None) -> None:
    """Log to stderr, unless the application has set up the package's logging itself."""
    if not get_logger("quire").handlers:
        observability = (config or QuireConfig()).observability
        configure_logging(observability.log_level, observability.log_format)


def _prompt_list(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, (str, Mapping, TextPrompt, TokensPrompt)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValidationError(
            f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}",
            hint="pass a text, a list of token ids, or a list of those",
            field="prompts",
        )
    items = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _conversation_list(messages: Any) -> list[Any]:
    """One conversation or many, as a list of conversations."""
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise ValidationError(
            f"messages must be a list of messages, not {type(messages).__name__}",
            hint='for example [{"role": "user", "content": "Hello"}]',
            field="messages",
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def _one_each(name: str, given: Sequence[Any] | None, count: int, default: Callable[[], Any]) -> list[Any]:
    """`given` as a list of `count`."""
    if given is None:
        return [default() for _ in range(count)]
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) != count:
        size = f"{len(given)}" if isinstance(given, Sequence) else type(given).__name__
        raise ValidationError(
            f"{name} must be one for each of {count} prompts, got {size}", hint=f"pass {count} or one", field=name
        )
    return list(given)


def _tenants(given: Tenants, count: int) -> list[TenantShare]:
    """One for each of `count` prompts."""
    if given is None or isinstance(given, TenantShare):
        return [given or NOBODY] * count
    tenants = _one_each("tenant", given, count, lambda: NOBODY)
    if not all(isinstance(one, TenantShare) for one in tenants):
        raise ValidationError("tenant must be a TenantShare, or one for each prompt", field="tenant")
    return tenants


def _final_only(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise ValidationError(
            f"sampling_params must be SamplingParams, not {type(params).__name__}", field="sampling_params"
        )
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        return params
    final = params.clone()
    final.output_kind = RequestOutputKind.FINAL_ONLY
    return final


def _add_special_tokens(tokenization_kwargs: Mapping[str, Any] | None) -> bool:
    kwargs = dict(tokenization_kwargs or {})
    add_special_tokens = kwargs.pop("add_special_tokens", True)
    if kwargs:
        name = next(iter(kwargs))
        raise UnsupportedError(
            f"tokenization_kwargs[{name!r}] is not supported",
            hint="only add_special_tokens is; a prompt is never cut",
            field="tokenization_kwargs",
        )
    return bool(add_special_tokens)
