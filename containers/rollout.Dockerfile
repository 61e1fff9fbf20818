# Rollout role: vLLM, and the controller. For NVIDIA GPUs; never built by this project.
# In the folder of the checkout: docker build -f containers/rollout.Dockerfile -t areal-lora-rollout .
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
WORKDIR /src
COPY containers/install.sh containers/
COPY requirements/gpu-rollout.txt requirements/
RUN sh containers/install.sh rollout
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY examples examples
COPY areal_lora areal_lora
RUN /opt/areal_lora/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation . \
    && mkdir -m 1777 /home/areal /work
ENV PATH=/opt/areal_lora/bin:$PATH HOME=/home/areal
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["areal-lora"]
CMD ["--help"]
