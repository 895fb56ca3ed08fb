.PHONY: run test check bench chaos soak clean lock

run test check bench chaos soak clean lock:
	@python3 dev.py $@ $(ARGS)
