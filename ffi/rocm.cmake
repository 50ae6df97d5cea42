# kda_jax._native_rocm, where hipcc is found or asked for. KDA_HIPCC may name any compiler driver that
# takes hipcc's arguments: tools/amd/hipcc.sh is one, for machines without ROCm.
if(NOT KDA_ROCM MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "KDA_ROCM=${KDA_ROCM}: want ON, OFF or AUTO")
endif()
if(KDA_ROCM STREQUAL "OFF")
  return()
endif()
find_program(KDA_HIPCC hipcc HINTS $ENV{ROCM_PATH}/bin /opt/rocm/bin)
if(NOT KDA_HIPCC)
  if(KDA_ROCM STREQUAL "ON")
    message(FATAL_ERROR "KDA_ROCM=ON and no hipcc was found; put it on the PATH, set ROCM_PATH, or name it with KDA_HIPCC")
  endif()
  message(STATUS "no hipcc: kda_jax is built without its ROCm kernel")
  return()
endif()

set(rocm_flags -O3 -DNDEBUG -std=c++17 -fPIC -fvisibility=hidden)
set(rocm_objects)
foreach(arch ${KDA_ROCM_ARCHITECTURES})
  list(APPEND rocm_flags --offload-arch=${arch})
endforeach()
file(GLOB rocm_headers CONFIGURE_DEPENDS gpu/*.h kernel/*.h)
# An object for each type and K, so that they compile side by side.
function(kda_add_rocm_object object source)
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${KDA_HIPCC} ${rocm_flags} ${ARGN} -c ${CMAKE_CURRENT_SOURCE_DIR}/${source} -o ${object}
    DEPENDS ${source} ${rocm_headers}
    VERBATIM)
  set(rocm_objects ${rocm_objects} ${object} PARENT_SCOPE)
endfunction()
foreach(io BF16 F16)
  foreach(k 64 128)
    kda_add_rocm_object(${CMAKE_CURRENT_BINARY_DIR}/rocm_driver_${io}_${k}.o gpu/driver.hip -DKDA_IO=${io} -DKDA_K=${k})
  endforeach()
  kda_add_rocm_object(${CMAKE_CURRENT_BINARY_DIR}/rocm_conv_${io}.o gpu/conv.hip -DKDA_IO=${io})
endforeach()
kda_add_module(_native_rocm ROCM Gpu xla/prefill_gpu.cc xla/conv_gpu.cc gpu/launch.cc ${rocm_objects})
set_source_files_properties(${rocm_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
list(JOIN KDA_ROCM_ARCHITECTURES "," architectures)
target_compile_definitions(_native_rocm PRIVATE KDA_ARCHITECTURES="${architectures}")
find_library(KDA_AMDHIP64 amdhip64 HINTS $ENV{ROCM_PATH}/lib /opt/rocm/lib REQUIRED)
target_link_libraries(_native_rocm PRIVATE ${KDA_AMDHIP64})
# A ROCm outside the loader's path is found where it was linked from.
set_target_properties(_native_rocm PROPERTIES INSTALL_RPATH_USE_LINK_PATH TRUE)
