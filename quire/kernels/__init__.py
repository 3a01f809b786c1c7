"""Operations on tensors that know nothing of the engine."""
