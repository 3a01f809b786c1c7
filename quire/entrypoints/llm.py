"""LLM: offline generation in the caller's process.

Called by users and the command line. Owns an `LLMEngine` and the names of the requests it has enqueued.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from quire.config import QuireConfig
from quire.config.build import build_config
from quire.core.beam_search import BeamSearchOutput, BeamSearchParams
from quire.core.inputs import TextPrompt, made_by_template, parse_prompt, with_token_ids
from quire.core.outputs import RequestOutput
from quire.core.request_options import RequestOptions
from quire.core.sampling_params import SamplingParams
from quire.engine.beam_search import request_params, search_output
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.interrupts import DeferredInterrupt
from quire.entrypoints.llm_arguments import (
    Messages,
    Params,
    Priority,
    Prompt,
    Tenants,
    conversation_list,
    options_list,
    params_list,
    prompt_list,
)
from quire.entrypoints.llm_controls import EngineControls
from quire.entrypoints.progress import Progress
from quire.errors import ChatTemplateError, UnsupportedError, require_unset
from quire.logger import configure_logging, get_logger
from quire.tokenization.chat_template import ChatTemplate, load_chat_template
from quire.tokenization.tokenizer import Tokenizer
from quire.utils.checks import check_int


class LLM(EngineControls):
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
        priority: Priority = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tenant: Tenants = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one batch as far as they fit.

        >>> outputs = llm.generate(["Once upon a time", "One day"], SamplingParams(temperature=0, max_tokens=8))
        >>> outputs[0].prompt, outputs[0].outputs[0].text
        ('Once upon a time', ', a funny fox called Ursula lived near')

        Args:
            prompts: one or many: strings, lists of token ids, {"prompt": ...}, {"prompt_token_ids": ...}.
            sampling_params: for all, or one for each; default: the model's own (`get_default_sampling_params`).
            use_tqdm: show a progress bar when the work takes long and stderr is a terminal.
            priority: of all prompts, or one for each; lower runs first, where the scheduling policy looks at it.
            tokenization_kwargs: only "add_special_tokens" is known.
            tenant: of all prompts, or one for each: the tenant to charge, where the scheduling policy is "fair".
            lora_request, mm_processor_kwargs: refused; not supported yet.

        Returns:
            One output for each prompt, in the order of the prompts.

        Raises:
            ValidationError: a prompt or parameter is wrong; nothing stays queued.
            EngineDeadError: the engine stopped.
        """
        require_unset(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        items = prompt_list(prompts)
        options = options_list(len(items), priority, tokenization_kwargs, tenant)
        names = self._submit(items, sampling_params, options)
        return self._run(names, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or many.

        >>> messages = [{"role": "user", "content": "What is 17 plus 25?"}]
        >>> llm.chat(messages, SamplingParams(temperature=0))[0].outputs[0].text
        '17 + 25 = 42'

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
        names = self._submit_chat(
            messages, sampling_params, priority, tokenization_kwargs,
            chat_template=chat_template, content_format=chat_template_content_format, tools=tools,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
        )  # fmt: skip
        return self._run(names, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        priority: Priority = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences after each prompt, found with `params.beam_width` beams.

        Args:
            concurrency_limit: most prompts at once; None = as many as fit.

        Other arguments, the order of what is returned and the errors are those of `generate`.
        """
        require_unset(lora_request=lora_request)
        one, items = request_params(params), prompt_list(prompts)
        size = len(items) if concurrency_limit is None else check_int("concurrency_limit", concurrency_limit, 1)
        options = options_list(len(items), priority)
        found: list[BeamSearchOutput] = []
        for start in range(0, len(items), max(1, size)):
            part = slice(start, start + size)
            outputs = self._run(self._submit(items[part], one, options[part]), use_tqdm)
            found += [search_output(output, params, self.llm_engine.tokenizer) for output in outputs]
        return found

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: Priority = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        tenant: Tenants = None,
    ) -> list[str]:
        """Submit prompts without waiting; returns their request ids. Arguments and errors as `generate`."""
        items = prompt_list(prompts)
        options = options_list(len(items), priority, tokenization_kwargs, tenant)
        names = self._submit(items, sampling_params, options)
        self._enqueued.extend(names)
        return names

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        lora_request: Any = None,
        use_tqdm: bool = True,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Submit conversations without waiting; returns their request ids. Arguments and errors as `chat`."""
        require_unset(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        names = self._submit_chat(
            messages, sampling_params, priority, tokenization_kwargs,
            chat_template=chat_template, content_format=chat_template_content_format, tools=tools,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
        )  # fmt: skip
        self._enqueued.extend(names)
        return names

    def wait_for_completion(
        self, output_type: type[RequestOutput] | None = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Run everything that was enqueued; its outputs in the order in which it was.

        Args:
            output_type: None or `RequestOutput`, which is all that there is.
        """
        if output_type not in (None, RequestOutput):
            raise UnsupportedError(
                f"output_type={output_type!r} is not supported: outputs are RequestOutput", hint="leave it out",
                field="output_type",
            )  # fmt: skip
        names, self._enqueued = self._enqueued, []
        return self._run(names, use_tqdm)

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

    def _submit_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params,
        priority: Priority,
        tokenization_kwargs: Mapping[str, Any] | None,
        *,
        chat_template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        **rendering: Any,
    ) -> list[str]:
        """Add all conversations or, when one is refused, none; `rendering` as `ChatTemplate.render`."""
        template = self._template(chat_template, with_tools=bool(tools))
        prompts = [
            made_by_template(template.render(conversation, tools=tools, **rendering), template.id)
            for conversation in conversation_list(messages)
        ]
        # The template writes BOS and every other special token itself.
        tokenization = {"add_special_tokens": False, **(tokenization_kwargs or {})}
        return self._submit(prompts, sampling_params, options_list(len(prompts), priority, tokenization))

    def _tokenized(self, prompts: Sequence[Any], add_special_tokens: bool) -> list[Any]:
        """`prompts`, the texts among them as token ids that were made all at once."""
        tokenizer, parsed = self.llm_engine.tokenizer, [parse_prompt(prompt) for prompt in prompts]
        texts = [one for one in parsed if isinstance(one, TextPrompt)]
        if tokenizer is None or len(texts) < 2:
            return parsed
        ids = iter(tokenizer.encode_batch([one.prompt for one in texts], add_special_tokens))
        return [with_token_ids(one, next(ids)) if isinstance(one, TextPrompt) else one for one in parsed]

    def _submit(
        self,
        prompts: Sequence[Any],
        sampling_params: Params,
        options: Sequence[RequestOptions],
    ) -> list[str]:
        """Add all prompts or, when one is refused, none."""
        params = params_list(sampling_params, len(prompts), self.get_default_sampling_params)
        prompts = self._tokenized(prompts, all(one.add_special_tokens for one in options))
        names: list[str] = []
        try:
            for prompt, one, own in zip(prompts, params, options, strict=True):
                names.append(str(next(self._names)))
                self.llm_engine.submit(names[-1], prompt, one, own)
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
                    progress.tick(self.llm_engine.last_stats.num_scheduled_tokens)
        except BaseException:
            self.llm_engine.discard_requests(names)
            for name in names:
                self._finished.pop(name, None)
            raise
        return [self._finished.pop(name) for name in names]

    def _tokenizer(self) -> Tokenizer:
        self.get_tokenizer()  # refuses where there is none
        assert self.llm_engine.tokenizer is not None
        return self.llm_engine.tokenizer

    def _template(self, chat_template: str | None, *, with_tools: bool) -> ChatTemplate:
        template = self.llm_engine.chat_template
        if chat_template is not None:
            template = load_chat_template(self._tokenizer(), chat_template)
        if template is None:
            raise ChatTemplateError(
                "this model has no chat template",
                hint="pass one (chat_template=...), or use generate() with a formatted prompt",
                field="chat_template",
            )
        return template.with_tools if with_tools else template


def _configure_logging_once(config: QuireConfig | None = None) -> None:
    """Log to stderr, unless the application has set up the package's logging itself."""
    if not get_logger("quire").handlers:
        observability = (config or QuireConfig()).observability
        configure_logging(observability.log_level, observability.log_format)
