"""Saves to a path, or loads from it, over and over: ``save_and_load.py save|load PATH COUNT``; 0: until it is ended.

Every weight, the optimizer's state and a plain value of a save are its number. A load whose values are not all one
number is a mixture. Prints, as one line of JSON, how many calls were made and, by what they say, the errors.
"""

import collections
import json
import os
import signal
import sys

import torch

import paramp


class Number:
    """A plain value that is saved."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main(what, path, count):
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    with paramp.launch_from_torch({"precision": "32-true"}):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=1.0)
        engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss)
        number = Number()
        engine.track("number", number)
        engine.forward_backward(torch.ones(1, 8), torch.ones(1, 8))
        engine.step()
        tensors = [*engine.module.parameters()]
        tensors += [state["momentum_buffer"] for state in engine.optimizer.state.values()]
        calls, errors = 0, collections.Counter()
        print("ready", flush=True)
        while not ended and (calls < count or not count):
            calls += 1
            try:
                if what == "save":
                    number.value = calls * 1000 + os.getpid() % 1000
                    with torch.no_grad():
                        torch._foreach_zero_(tensors)
                        torch._foreach_add_(tensors, float(number.value))
                    engine.save(path)
                else:
                    engine.load(path)
                    found = {number.value} | {
                        value for tensor in tensors for value in tensor.detach().unique().tolist()
                    }
                    if len(found) > 1:
                        errors[f"a mixture of {len(found)}"] += 1
            except Exception as error:
                errors[f"{type(error).__name__}: {error}"[:300]] += 1
    print(json.dumps({"calls": calls, "errors": errors}), flush=True)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
