"""Temporary."""

from __future__ import annotations


class Detokenizer:
    def __init__(self, tokenizer, *, skip_special_tokens=True, stop=(), include_stop_str_in_output=False):
        self.t, self.skip, self.stop, self.inc, self.ids, self.text = (
            tokenizer,
            skip_special_tokens,
            stop,
            include_stop_str_in_output,
            [],
            "",
        )

    def push(self, token_id, *, check_stop=True):
        self.ids.append(token_id)
        before = len(self.text)
        self.text = self.t.decode(self.ids, skip_special_tokens=self.skip)
        if check_stop:
            for s in self.stop:
                at = self.text.find(s)
                if at >= 0:
                    self.text = self.text[: at + len(s) * self.inc]
                    return s
        return None

    def finish(self):
        pass
