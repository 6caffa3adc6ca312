"""The laboratory's exact iterations on stale trajectories, in float64 loops over all sequences."""

import itertools

import numpy as np

EPOCHS, CLIP, RATE = 4, 0.2, 3.0


class Lab:
    """A problem of K tokens with A actions each, its turns, and tables as policies.

    A policy is float64 [C, A], logits of every context; contexts are numbered by length, and then
    as the digits of a number. Advantages are rewards minus their expectation.

    Args:
      mean: shape (A,) x K. turn_tokens: tokens of a turn.
    """

    def __init__(self, mean, turn_tokens):
        self.actions, tokens = mean.shape[0], mean.ndim
        self.turns = [range(first, first + turn_tokens) for first in range(0, tokens, turn_tokens)]
        self.reward = {sequence: mean[sequence] for sequence in np.ndindex(mean.shape)}
        self.contexts = {}
        for length in range(tokens):
            for context in itertools.product(range(self.actions), repeat=length):
                self.contexts[context] = len(self.contexts)

    def logp(self, table, sequence, k):
        row = table[self.contexts[sequence[:k]]]
        return row[sequence[k]] - np.log(np.sum(np.exp(row)))

    def slope(self, table, sequence, k):
        """The derivative of `logp` by the table."""
        row = table[self.contexts[sequence[:k]]]
        gradient = np.zeros_like(table)
        gradient[self.contexts[sequence[:k]]] = -np.exp(row) / np.sum(np.exp(row))
        gradient[self.contexts[sequence[:k]], sequence[k]] += 1
        return gradient

    def probability(self, table, sequence):
        return np.exp(sum(self.logp(table, sequence, k) for k in range(len(sequence))))

    def value(self, table):
        return sum(self.probability(table, each) * self.reward[each] for each in self.reward)

    def weights(self, now, sampler, sequence, correction):
        """The weight of each token; None: rejected. `correction`: method, per, clip and low."""
        if correction is None or correction == "none":
            return [1.0] * len(sequence)
        method, per, clip, low = correction
        units = {
            "token": [[k] for turn in self.turns for k in turn],
            "turn": self.turns,
            "trajectory": [range(len(sequence))],
        }[per]
        weights = []
        for unit in units:
            rho = 1.0
            for k in unit:
                rho *= np.exp(self.logp(now, sequence, k)) / np.exp(self.logp(sampler, sequence, k))
            inside = low <= rho <= clip
            weight = {
                "truncate": min(rho, clip),
                "mask": rho if inside else None,
                "reject": 1.0 if inside else None,
            }[method]
            weights += [weight] * len(unit)
        return weights

    def slopes(self, table, turn, now, sampler, correction, factor):
        """The terms of an objective of geometric ratios on a turn: each trajectory's gradient.

        Args:
          now: the policy before the sweep. factor: of each sequence, its cumulative ratio.

        Returns: by sequence, [C, A], which the trajectories' probabilities average, rejected ones
          left out of the denominator; and whether a token has no gradient, by sequence and token.
        """
        old = sampler if correction is None else now
        value, kept_share = self.value(sampler), 0.0
        terms, dead = {}, {}
        for sequence, reward in self.reward.items():
            weights = self.weights(now, sampler, sequence, correction)
            kept = [k for k in self.turns[turn] if weights[k] is not None]
            dead |= {(sequence, k): True for k in self.turns[turn]}
            terms[sequence] = np.zeros_like(table)
            if not kept:
                continue
            kept_share += self.probability(sampler, sequence)
            difference = [self.logp(table, sequence, k) - self.logp(old, sequence, k) for k in kept]
            ratio = np.exp(np.mean(difference))
            m = (reward - value) * factor[sequence]
            if ratio * m > np.clip(ratio, 1 - CLIP, 1 + CLIP) * m:
                continue
            weight = np.mean([weights[k] for k in kept])
            for k in kept:
                terms[sequence] += weight * m * ratio / len(kept) * self.slope(table, sequence, k)
                dead[sequence, k] = False
        scale = 1 / kept_share if kept_share else 0.0
        return {sequence: scale * term for sequence, term in terms.items()}, dead

    def iterate(self, now, sampler, correction):
        """The policy after a sweep over trajectories of `sampler`, the last turn first."""
        table, factor = now, dict.fromkeys(self.reward, 1.0)
        old = sampler if correction is None else now
        for turn in reversed(range(len(self.turns))):
            for _ in range(EPOCHS):
                terms, _ = self.slopes(table, turn, now, sampler, correction, factor)
                table = table + RATE * sum(
                    self.probability(sampler, each) * term for each, term in terms.items()
                )
            for sequence in factor:
                weights = self.weights(now, sampler, sequence, correction)
                moved = [
                    self.logp(table, sequence, k) - self.logp(old, sequence, k)
                    for k in self.turns[turn]
                    if weights[k] is not None
                ]
                factor[sequence] *= np.exp(np.mean(moved)) if moved else 1.0
        return table

    def run(self, iterations, lag=0, correction="none"):
        """The policies of a run, the first one included."""
        tables = [np.zeros((len(self.contexts), self.actions))]
        for i in range(iterations):
            tables.append(self.iterate(tables[i], tables[max(0, i - lag)], correction))
        return tables

    def gradient(self, now, sampler, correction):
        """The gradient before a sweep's first step, its deviation over trajectories, and the share
        of tokens with an advantage that have none."""
        ones, dead = dict.fromkeys(self.reward, 1.0), {}
        whole = {sequence: 0.0 for sequence in self.reward}
        for turn in range(len(self.turns)):
            terms, of_turn = self.slopes(now, turn, now, sampler, correction, ones)
            whole = {sequence: whole[sequence] + terms[sequence] for sequence in whole}
            dead |= of_turn
        share = {sequence: self.probability(sampler, sequence) for sequence in whole}
        mean = sum(share[each] * term for each, term in whole.items())
        variance = sum(share[each] * np.sum((term - mean) ** 2) for each, term in whole.items())
        lost = sum(share[sequence] * gone for (sequence, _), gone in dead.items())
        return mean, np.sqrt(variance), lost / (len(dead) / len(share))
